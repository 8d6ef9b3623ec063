"""What the API answers, and what people and programs ask of it beside batches.

The page, the command line and the tests read these; docs/api derives from them. Numbers that are not finite travel as
"NaN", "Infinity" and "-Infinity"; `null` means that nothing was counted. Times are Unix seconds by the service's clock
unless a field says otherwise. Text that people write is recorded: none may hold a NUL or half of a surrogate pair,
which JSON can spell and no store can keep.
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
    """Base of every answer."""

    model_config = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True
    )


class ProblemItem(Response):
    """One thing that is wrong with a request."""

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
    """Who asks. `csrf_token` goes into the header X-CSRF-Token of every POST that is authenticated by the cookie."""

    login_needed: bool
    name: str | None = None
    scopes: list[str]
    csrf_token: str | None = None


class IncidentChange(IncidentInShort):
    """An incident in short: in the list of runs, in the event log, in the stream."""

    grown: bool = Field(default=False, description="in the log: written because it grew tenfold, nothing else changed")


class IncidentList(Response):
    """Every incident of a run, the most urgent first: one for each cause, or for rounding and score growth together."""

    incidents: list[Incident]


class RunSummary(Response):
    """One row of the list of runs."""

    run: str
    status: RunStatus = Field(description="as its processes reported it; `condition` is how it is by now")
    condition: Condition = Field(
        description="silent: not heard of for five minutes; hung: heard of, but no step ends; else its status"
    )
    condition_since_unix_seconds: float | None = Field(description="since when it is silent or hung")
    severity: Severity | None = Field(
        description="of its worst open incident; at least warning when silent or hung, critical when its loss is not "
        "finite; null: nothing is known to be wrong"
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
        default=None, description="of which ranks several processes live, in a sentence; null: of none"
    )
    first_seen_unix_seconds: float
    last_seen_unix_seconds: float
    last_step: int | None
    last_step_unix_seconds: float | None = Field(
        default=None, description="when the newest step came, or the process started"
    )
    hung_after_seconds: float = Field(
        default=FIRST_STEP_SECONDS, description="an active run that has ended no step for longer hangs"
    )
    loss: Number
    worst_risk: Number
    active_warnings: int
    forecast_steps: Number = Field(
        default=None, description="the shortest forecast of them: steps until the largest |score| reaches 512"
    )
    incidents: list[IncidentChange] = Field(
        default_factory=list, description="those that are not closed, the most urgent first"
    )
    labels: dict[str, str]
    display_name: str | None = Field(default=None, description="display name; null: none")
    tags: list[str] = Field(default_factory=list, description="its tags, sorted")


class RunList(Response):
    """Runs, the one heard from last first."""

    runs: list[RunSummary]
    next_cursor: str | None = Field(description="pass as ?cursor= for the next page; null on the last one")


class LayerState(Response):
    """One watched layer, all ranks together. `modes` and `risk` stand in the order of `heads`."""

    layer: int
    name: str
    heads: list[int]
    kv_heads: int | None = Field(description="null: nothing in the model shows its agent how many there are")
    head_dim: int | None = Field(description="null: neither the model nor a call shows it to the agent")
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
    """Everything known of one run at its last step."""

    versions: dict[str, str]
    layers: list[LayerState]
    warnings: list[ActiveWarning]
    latest: dict[str, Number] = Field(description="run-level metrics of the last sample, by catalogue key")
    agent_dropped: dict[str, int]
    agent_faults: dict[str, int]
    notes: str = Field(default="", description="what people wrote about it")


class CurveLine(Response):
    """One curve, without points where the run lacks the head.

    The four lists have one entry per point; a point spans the steps since the one before, and keeps their minimum and
    maximum. The worst head of a layer is found at each step: the line shows the value of the one that was the worst.
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
        default=None, description="for the worst head of a layer: which head it was at the point's worst step"
    )


class Curves(Response):
    """Curves over the same steps, in the order in which they were asked for; at most max_points points each.

    Where no layer was named for a metric of heads, the lines of all layers stand in its place.
    """

    run: str
    lines: list[CurveLine]
    unknown: list[str] = Field(description="lines that were asked for of a layer or head that the run does not have")


class Matrix(Response):
    """One per-head metric at the newest step that is not after the one asked for.

    Spectral norms, which are measured now and then, are shown as they were last measured.
    """

    run: str
    metric: str
    unit: str
    step: int | None = Field(description="the step shown; null when there is no sample at or before the one asked for")
    measured_step: int | None = Field(description="by when the values were measured; null when they never were")
    layers: list[int]
    heads: list[int]
    next_layer: int | None = Field(
        default=None, description="the first layer that did not fit; ask again with from_layer for it and those after"
    )
    values: list[list[Number]] = Field(description="[layers, heads]; null where a layer lacks the head, or its count")
    steps: list[int] = Field(description="steps that can be asked for, thinned to at most max_steps, ascending")


class RankAnswer(Response):
    """Where a command stands with one rank."""

    rank: int
    deliveries: int
    outcome: Outcome | None = Field(description="null until the rank has answered")
    step: int | None = None
    heads: list[HeadRef] = []
    before: list[str] = []
    after: list[str] = []
    reason: str = ""


class CommandStatus(Order):
    """An order and its way through the ranks."""

    run: str
    what: str = Field(description="what it does, in words")
    ranks: list[RankAnswer]
    closed_because: str | None = Field(
        default=None, description="why it is refused though no rank refused it: all that could answer have ended"
    )
    undone_by: str | None = Field(default=None, description="the order that takes this one's switch back")


class CommandList(Response):
    """Commands of a run, newest first."""

    commands: list[CommandStatus]


class SwitchedTo(Response):
    """Heads that an order gives a mode."""

    mode: str
    heads: list[HeadRef] | None = Field(description="null means every head of the run")


class SwitchPlan(Response):
    """What ordering a mode for every head takes: an order for each of `changes`."""

    changes: list[SwitchedTo]
    unchanged: list[HeadRef] = Field(description="heads that already have the mode among others, and keep them")


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
    """Something that happened. Exactly the field that `kind` names is set, except for started and finished."""

    id: int = Field(description="number within the run: 1 is the first event that was stored of it")
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
    """What became of the alerts of one webhook delivery."""

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
    _refused(lambda text: "\x00" in text, "holds a NUL character, which cannot be stored; leave it out"),
    _refused(
        lambda text: any("\ud800" <= character <= "\udfff" for character in text),
        "holds half of a surrogate pair, which is no character; leave it out",
    ),
]
"""Text of a request that every store takes: PostgreSQL has no NUL, and UTF-8 no lone surrogate."""
Said = Annotated[Storable, _refused(lambda text: not text.strip(), "is blank; the audit trail needs a word")]
"""Who acts, and why."""
Line = Annotated[
    Storable,
    _refused(
        lambda text: not text.isprintable() or text != text.strip(),
        "holds a control character, or blanks at an end; write it on one line",
    ),
]
Tag = Annotated[
    Line,
    Field(min_length=1, max_length=64),
    _refused(
        lambda text: not {",", "="}.isdisjoint(text),
        "holds a comma or an equals sign, which no tag may: NAME=VALUE is a label",
    ),
]


class Request(BaseModel):
    """Base of every body of a request."""

    model_config = ConfigDict(extra="forbid")


class Login(Request):
    """A token in exchange for a session cookie."""

    token: Storable = Field(max_length=512)


class Decision(Request):
    """Approval or rejection of a proposed command, or the end of one that is under way."""

    who: Said = Field(min_length=1, max_length=128)
    reason: Said = Field(min_length=1, max_length=500)


class CommandRequest(Decision):
    """An order to a running training."""

    who: Said = Field(min_length=1, max_length=128, description="who requests it; recorded in the audit trail")
    heads: list[HeadRef] | None = Field(
        default=None, max_length=MAX_LAYERS * 64, description="[[layer, head], ...]; null means every head of the run"
    )
    action: str = Field(default="switch", description="the kind of order")
    mode: ModeName | None = Field(default=None, description="the mode that these heads get; of a switch alone")
    expect: ModeName | None = Field(default=None, description="refuse unless every named head has this mode now")
    expires_in_seconds: float | None = Field(default=None, gt=0, le=30 * 86400)
    expires_step: Step | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if not can_order(self.action, self.mode or "") or (self.action != "switch" and self.mode is not None):
            raise ValueError(
                f"{self.action!r} with mode {self.mode!r} is not an order; a switch, and it alone, has a mode"
            )
        return self


class Acknowledgement(Decision):
    """Somebody takes care of an incident."""

    incident: Storable = Field(max_length=64, description="its id: its cause, with a dash for a space")


class Undo(Decision):
    """An order to take a switch back."""

    reason: Said = Field(min_length=1, max_length=480)
    dry_run: bool = False


class Description(Request):
    """What people say of a run. What is left out stays as it is; what is empty is taken away."""

    who: Said = Field(min_length=1, max_length=128)
    display_name: Annotated[Line, Field(max_length=128)] | None = None
    tags: list[Tag] | None = Field(default=None, max_length=32)
    notes: Annotated[Storable, Field(max_length=4000)] | None = None
