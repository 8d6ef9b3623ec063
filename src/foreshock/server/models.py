"""The responses of the API, and all request bodies except batches.

The page, the command line and the tests use these models, and docs/api is generated from them. Non-finite numbers are
encoded as "NaN", "Infinity" and "-Infinity"; `null` means that nothing was counted. Times are Unix seconds by the
service's clock unless a field says otherwise. Text from people must not contain a NUL or half of a surrogate pair,
because JSON can encode these but the database cannot store them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from foreshock.contract.incident import Acknowledged, Incident, IncidentInShort
from foreshock.contract.metrics.run_metrics import FIRST_STEP_SECONDS
from foreshock.contract.orders import Order, can_order
from foreshock.contract.wire import (
    MAX_LAYERS,
    Checkpoint,
    Clipped,
    HeadRef,
    ModeName,
    Outcome,
    Policy,
    Severity,
    Step,
    Switched,
    Verdict,
)

RunStatus = Literal["active", "completed", "failed", "stopped"]
Condition = Literal["active", "hung", "silent", "completed", "failed", "stopped"]
Number = float | None


class Response(BaseModel):
    """Base of every response."""

    model_config = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True
    )


class ProblemItem(Response):
    """One error in a request."""

    where: str = Field(description="path into the request, as events.3.step")
    message: str


class Problem(Response):
    """RFC 9457 problem details, sent as application/problem+json for every error."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[ProblemItem] = Field(default_factory=list, description="up to ten of them")


class Session(Response):
    """The caller. Every POST that is authenticated by the cookie needs `csrf_token` in the header X-CSRF-Token."""

    login_needed: bool
    name: str | None = None
    scopes: list[str]
    csrf_token: str | None = None


class IncidentChange(IncidentInShort):
    """The short form of an incident in the list of runs, in the event log, and in the stream."""

    grown: bool = Field(default=False, description="in the log: true if the incident only grew tenfold")


class IncidentList(Response):
    """Every incident of a run, the most urgent first: one for each cause, or for rounding and score growth together."""

    incidents: list[Incident]


class RunSummary(Response):
    """One row of the list of runs."""

    run: str
    status: RunStatus = Field(description="as its processes reported it; `condition` is its state by now")
    condition: Condition = Field(
        description="silent: nothing received for five minutes; hung: heartbeats arrive, but no step ends; else status"
    )
    condition_since_unix_seconds: float | None = Field(description="since when it is silent or hung")
    severity: Severity | None = Field(
        description="of its worst open incident; at least warning when silent or hung, critical when its loss is not "
        "finite; null: no known problem"
    )
    urgency: int = Field(description="the larger, the sooner it needs a person; ended runs are below the others")
    policy: Policy | None = Field(description="null until a process has described its layers")
    numerics: str | None
    mitigation: str | None
    qk_clip: str | None = Field(
        default=None, description="QK-Clip: never, warned (off until scores grow) or on; null: it cannot scale here"
    )
    switch_scope: str | None = Field(
        default=None, description="the scope of a switch under approve and auto: head, layer or model"
    )
    world_size: int | None
    ranks: int = Field(description="ranks that have sent something")
    shared_ranks: str | None = Field(
        default=None, description="a sentence that names ranks used by several living processes; null: none"
    )
    first_seen_unix_seconds: float
    last_seen_unix_seconds: float
    last_step: int | None
    last_step_unix_seconds: float | None = Field(
        default=None, description="when the newest step arrived, or the process started"
    )
    hung_after_seconds: float = Field(
        default=FIRST_STEP_SECONDS, description="an active run is hung if no step ended for longer than this"
    )
    loss: Number
    worst_risk: Number
    active_warnings: int
    forecast_steps: Number = Field(
        default=None, description="shortest forecast of its warnings: steps until the largest |score| reaches 512"
    )
    incidents: list[IncidentChange] = Field(
        default_factory=list, description="incidents that are not closed, the most urgent first"
    )
    labels: dict[str, str]
    display_name: str | None = Field(default=None, description="display name; null: none")
    tags: list[str] = Field(default_factory=list, description="its tags, sorted")


class RunList(Response):
    """Runs, the one heard from last first."""

    runs: list[RunSummary]
    next_cursor: str | None = Field(description="pass as ?cursor= for the next page; null on the last one")


class LayerState(Response):
    """One watched layer, all ranks together. `modes` and `risk` are in the order of `heads`."""

    layer: int
    name: str
    heads: list[int]
    kv_heads: int | None = Field(description="null: the agent cannot find the number in the model")
    head_dim: int | None = Field(description="null: the agent cannot find it in the model or in a call")
    served_by: str
    sampled: bool
    modes: list[str | None]
    risk: list[Number]


class ActiveWarning(Verdict):
    """A warning that is raised and not cleared, in its latest wording. layer and head are null for the whole run."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)
    rank: int
    raised_step: int


class RunDetail(RunSummary):
    """The full state of one run at its last step."""

    versions: dict[str, str]
    layers: list[LayerState]
    warnings: list[ActiveWarning]
    latest: dict[str, Number] = Field(description="run-level metrics of the last sample, by catalogue key")
    agent_dropped: dict[str, int]
    agent_faults: dict[str, int]
    notes: str = Field(default="", description="notes that people wrote about it")


class CurveLine(Response):
    """One curve; it has no points if the run does not have the head.

    The four lists have one entry per point. A point covers the steps since the previous point, with their minimum,
    maximum and last value. The worst head of a layer is chosen at each step, so one line may show several heads.
    """

    metric: str
    unit: str
    layer: int | None
    head: int | None = Field(description="null for a run-level metric, and for the worst head of a layer")
    steps: list[int]
    low: list[Number]
    high: list[Number]
    last: list[Number]
    worst_head: list[int | None] | None = Field(
        default=None, description="for the worst head of a layer: the number of that head at the point's worst step"
    )


class Curves(Response):
    """Curves over the same steps, in the requested order; at most max_points points each.

    A per-head metric requested without a layer has one line for each layer.
    """

    run: str
    lines: list[CurveLine]
    unknown: list[str] = Field(description="requested lines whose layer or head does not exist in the run")


class Matrix(Response):
    """One per-head metric at the requested step, or at the newest step before it.

    Spectral norms, which only some samples contain, are shown as they were last measured.
    """

    run: str
    metric: str
    unit: str
    step: int | None = Field(description="the step shown; null if there is no sample at or before the requested step")
    measured_step: int | None = Field(description="the step by which the values were measured; null: never")
    layers: list[int]
    heads: list[int]
    next_layer: int | None = Field(
        default=None, description="the first layer that did not fit; pass it as from_layer to get the next layers"
    )
    values: list[list[Number]] = Field(description="[layers, heads]; null if the head does not exist or has no value")
    steps: list[int] = Field(description="steps that can be requested, thinned to at most max_steps, ascending")


class RankAnswer(Response):
    """The state of a command at one rank."""

    rank: int
    deliveries: int
    outcome: Outcome | None = Field(description="null until the rank has answered")
    step: int | None = None
    heads: list[HeadRef] = []
    before: list[str] = []
    after: list[str] = []
    reason: str = ""


class CommandStatus(Order):
    """An order and the answers of the ranks."""

    run: str
    what: str = Field(description="the action in words")
    ranks: list[RankAnswer]
    closed_because: str | None = Field(
        default=None, description="why it was refused without a rank's answer: all ranks that could answer have ended"
    )
    undone_by: str | None = Field(default=None, description="the order that undoes this switch")


class CommandList(Response):
    """Commands of a run, newest first."""

    commands: list[CommandStatus]


class SwitchedTo(Response):
    """Heads and the mode that an order gives them."""

    mode: str
    heads: list[HeadRef] | None = Field(description="null means every head of the run")


class SwitchPlan(Response):
    """The orders needed to add a mode to every head: one for each of `changes`."""

    changes: list[SwitchedTo]
    unchanged: list[HeadRef] = Field(description="heads that already have this mode together with others")


EventKind = Literal[
    "started",
    "verdict",
    "switched",
    "clipped",
    "checkpoint",
    "command",
    "finished",
    "incident",
    "acknowledged",
    "described",
]


class RunEvent(Response):
    """One event. Only the field that `kind` names is set; started and finished have no such field."""

    id: int = Field(description="number within the run, counted from 1")
    run: str
    kind: EventKind
    rank: int | None = Field(description="null for actions of the service")
    step: int | None
    unix_seconds: float
    sentence: str = Field(description="the event in words")
    verdict: Verdict | None = None
    switched: Switched | None = None
    clipped: Clipped | None = None
    checkpoint: Checkpoint | None = None
    command: Order | None = None
    incident: IncidentChange | None = None
    acknowledged: Acknowledged | None = None


class EventList(Response):
    """Events, newest first."""

    events: list[RunEvent]
    next_cursor: str | None


class AuditRow(Response):
    """One line of the append-only audit trail."""

    sequence: int
    unix_seconds: float
    actor: str
    action: str
    run: str | None
    command: str | None
    details: dict[str, Any]


class AuditPage(Response):
    """The audit trail, newest first."""

    rows: list[AuditRow]
    next_cursor: str | None


class WebhookResult(Response):
    """The results of the alerts in one webhook delivery."""

    results: list[str]


class StreamSample(Response):
    """Data of the stream's `sample` events: a run's newest numbers. They have no id and are not replayed."""

    run: str
    step: int
    latest: dict[str, Number] = Field(description="run-level metrics by catalogue key")


class Health(Response):
    """The service's own state."""

    status: Literal["ok", "degraded"]
    checks: dict[str, str]


def _refused(wrong: Callable[[str], bool], why: str) -> AfterValidator:
    def check(text: str) -> str:
        if wrong(text):
            raise ValueError(why)
        return text

    return AfterValidator(check)


Storable = Annotated[
    str,
    _refused(lambda text: "\x00" in text, "contains a NUL character, which cannot be stored; remove it"),
    _refused(
        lambda text: any("\ud800" <= character <= "\udfff" for character in text),
        "contains half of a surrogate pair, which is not a character; remove it",
    ),
]
"""Text of a request that every database can store: PostgreSQL rejects NUL, and UTF-8 cannot encode a lone surrogate."""
Said = Annotated[Storable, _refused(lambda text: not text.strip(), "is blank; the audit trail needs a text")]
"""The name of a person, or a reason, for the audit trail."""
Line = Annotated[
    Storable,
    _refused(
        lambda text: not text.isprintable() or text != text.strip(),
        "contains a control character, or starts or ends with a blank; write it on one line",
    ),
]
Tag = Annotated[
    Line,
    Field(min_length=1, max_length=64),
    _refused(
        lambda text: not {",", "="}.isdisjoint(text),
        "contains a comma or an equals sign, which a tag must not: NAME=VALUE is a label",
    ),
]


class Request(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid")


class Login(Request):
    """A token to exchange for a session cookie."""

    token: Storable = Field(max_length=512)


class Decision(Request):
    """Approval or rejection of a proposed command, or cancellation of an open one."""

    who: Said = Field(min_length=1, max_length=128)
    reason: Said = Field(min_length=1, max_length=500)


class CommandRequest(Decision):
    """An order to a running training."""

    who: Said = Field(min_length=1, max_length=128, description="who requests it; recorded in the audit trail")
    heads: list[HeadRef] | None = Field(
        default=None, max_length=MAX_LAYERS * 64, description="[[layer, head], ...]; null means every head of the run"
    )
    action: str = Field(default="switch", description="the kind of order")
    mode: ModeName | None = Field(default=None, description="the mode that these heads get; only for a switch")
    expect: ModeName | None = Field(default=None, description="refuse unless every named head has this mode now")
    expires_in_seconds: float | None = Field(default=None, gt=0, le=30 * 86400)
    expires_step: Step | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if not can_order(self.action, self.mode or "") or (self.action != "switch" and self.mode is not None):
            raise ValueError(f"{self.action!r} with mode {self.mode!r} is not an order; only a switch has a mode")
        return self


class Acknowledgement(Decision):
    """A statement that somebody takes care of an incident."""

    incident: Storable = Field(max_length=64, description="the incident's id: its cause, with a dash for a space")


class Undo(Decision):
    """An order to undo a switch."""

    reason: Said = Field(min_length=1, max_length=480)
    dry_run: bool = False


class Description(Request):
    """Display name, tags and notes of a run. A missing field stays unchanged; an empty one is removed."""

    who: Said = Field(min_length=1, max_length=128)
    display_name: Annotated[Line, Field(max_length=128)] | None = None
    tags: list[Tag] | None = Field(default=None, max_length=32)
    notes: Annotated[Storable, Field(max_length=4000)] | None = None
