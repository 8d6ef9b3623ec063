"""The messages between agent and service, version 1.

The agent sends batches; the service answers each with an acknowledgement that carries commands. A batch is identified
by (run, rank, boot, sequence): sending it twice changes nothing. JSON only; arrays are encoded as base64 of
little-endian bytes, so that a NaN keeps its bits; a non-finite scalar is encoded as a string ("NaN", "Infinity").

Agents and services of different versions work together (docs/compatibility.md): a reader skips unknown fields, slots
and kinds of events, and keeps unknown names of modes as text. It checks everything else, so that acknowledged data can
always be read.
"""

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import pybase64
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from foreshock.contract.causes import Cause, IncidentCause
from foreshock.contract.modes import DEFAULT_MITIGATION, MODE_PATTERN, mode_name, parse_mode
from foreshock.contract.slots import MOST_SLOTS, OLDEST_SLOT_COUNT, Words, fitted

WIRE_VERSION: Final = 1
MAX_LAYERS: Final = 1024
MAX_LAYER_NUMBER: Final = 99_999
MAX_HEADS: Final = 1024
MAX_EVENTS: Final = 512
MAX_VALUES: Final = 2**20
"""Maximum number of values in a batch, including lists, objects and their entries, but not the contents of arrays."""
MAX_BATCH_BYTES: Final = 32 * 2**20
MAX_ACK_BYTES: Final = 2**20
"""Maximum size of an acknowledgement: one command may name every head; further commands wait for the next one."""
AGE_HEADER: Final = "foreshock-process-age"
"""Header of a batch: the age in seconds of its process when the batch is sent, by a monotonic clock."""
REPLAYED_HEADER: Final = "foreshock-replayed"
"""Header of a batch, `true` if a successor sends it from the spool of a dead process."""


class Message(BaseModel):
    """Base of every message: frozen, non-finite scalars as strings. Fields of a newer version are skipped."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


def first_error(error: ValidationError) -> str:
    """Return the path and the message of the first error, without the input."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _at_most(entries: int) -> BeforeValidator:
    """Reject a longer object before its entries are validated, because each invalid entry would be a separate error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"has {len(value)} entries, at most {entries} are allowed")
        return value

    return BeforeValidator(check)


def _decoded(data: str) -> bytes:
    return pybase64.b64decode(data, validate=True)


class Array(Message):
    """A small numeric array, exact to the bit."""

    dtype: Literal["<i8", "<f8", "<f4", "<i4"]
    shape: tuple[Annotated[int, Field(ge=0, le=2**20)], ...] = Field(max_length=4)
    data: str = Field(max_length=MAX_BATCH_BYTES)

    @model_validator(mode="after")
    def _size_matches(self) -> Self:
        want = math.prod(self.shape) * int(self.dtype[2])
        padding = 2 if self.data.endswith("==") else 1 if self.data.endswith("=") else 0
        have = len(self.data) // 4 * 3 - padding
        if len(self.data) % 4 or have != want:
            raise ValueError(f"array of shape {self.shape} and dtype {self.dtype} needs {want} bytes, got {have}")
        try:
            self.__dict__["raw"] = _decoded(self.data)  # fills the cache of `raw`
        except ValueError as error:
            raise ValueError(f"array data is not base64: {error}") from None
        return self

    @cached_property
    def raw(self) -> bytes:
        """The values, little-endian and in C order. Raises ValueError if `data` is not base64."""
        return _decoded(self.data)

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Self:
        """Encode an int64, float64, float32 or int32 array."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        dtype: Any = little.dtype.str
        return cls(dtype=dtype, shape=values.shape, data=pybase64.b64encode_as_string(little.data))

    def numpy(self) -> npt.NDArray[Any]:
        """Decode into a new writable array."""
        return np.frombuffer(bytearray(self.raw), dtype=self.dtype).reshape(self.shape)


_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def _identifier(value: str) -> str:
    if not _IDENTIFIER.fullmatch(value):
        raise ValueError(f"{value[:140]!r} is not an identifier; allowed are 1 to 128 of A-Z a-z 0-9 _ . : / -")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]
"""Names a run, a layer or a boot; safe as a label, never used as a path."""

Count = Annotated[int, Field(ge=0, le=2**53)]
Step = Count
UnixSeconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
"""Wall-clock time, for display only."""
LayerNumber = Annotated[int, Field(ge=0, le=MAX_LAYER_NUMBER)]
HeadNumber = Annotated[int, Field(ge=0, lt=MAX_HEADS)]
ModeName = Annotated[
    str,
    Field(max_length=64, json_schema_extra={"pattern": f"^({MODE_PATTERN})$"}),
    AfterValidator(lambda name: mode_name(parse_mode(name))),
]
"""A known mode, for requests and settings; its parts are put in the order of contract.modes.MODES."""
ReportedModeName = Annotated[str, Field(pattern=r"^[a-z0-9_+]{1,64}$")]
"""The name of a mode that another process reports; it may be unknown if that process has a newer version."""
Severity = Literal["info", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""In ascending order."""


def _other_if_newer(known: tuple[str, ...]) -> BeforeValidator:
    """Replace an unknown cause, from a newer process, by `other`."""
    newer = re.compile(r"[a-z]+( [a-z]+){0,3}")
    return BeforeValidator(lambda name: "other" if name not in known and newer.fullmatch(str(name)) else name)


ClipState = Literal["never", "warned", "on"]
"""State of QK-Clip: off, off until scores grow, on."""
Policy = Literal["observe", "approve", "auto"]


class Layer(Message):
    """One watched attention layer as this rank sees it. `layer` and `heads` are global numbers."""

    layer: LayerNumber
    name: Identifier
    heads: Annotated[tuple[HeadNumber, ...], FailFast()] = Field(min_length=1, max_length=MAX_HEADS)
    kv_heads: int = Field(ge=1, le=MAX_HEADS)
    head_dim: int = Field(ge=0, le=4096, description="0: found neither in the model nor in a call")
    served_by: str = Field(max_length=64, description="implementation of this layer: kernel, reference, probe")
    sampled: bool = False
    kv_heads_known: bool = Field(default=True, description="false: unknown, and kv_heads is the number of heads")

    @field_validator("heads")
    @classmethod
    def _heads_distinct(cls, heads: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(heads)) != len(heads):
            raise ValueError("heads must be distinct numbers")
        return heads


HeadRef = tuple[LayerNumber, HeadNumber]
"""(layer, head), both global."""


class Started(Message):
    """First event of a boot: its layers and settings. Batches are accepted even if it is missing."""

    kind: Literal["started"] = "started"
    step: Step
    unix_seconds: UnixSeconds
    world_size: int = Field(default=1, ge=1, le=10**6)
    layers: Annotated[tuple[Layer, ...], FailFast()] = Field(max_length=MAX_LAYERS)
    policy: Policy
    numerics: str = Field(max_length=32)
    mitigation: ReportedModeName = DEFAULT_MITIGATION
    switch_scope: str | None = Field(
        default=None, pattern="^[a-z_]{1,16}$", description="the scope of a switch: head, layer, model"
    )
    qk_clip: str | None = Field(
        default=None, pattern="^[a-z_]{1,16}$", description="QK-Clip: never, warned, on; null: it cannot scale here"
    )
    labels: Annotated[dict[Identifier, Annotated[str, Field(max_length=256)]], _at_most(32)] = Field(
        default_factory=dict, max_length=32
    )
    versions: Annotated[dict[Identifier, Annotated[str, Field(max_length=64)]], _at_most(32)] = Field(
        default_factory=dict, max_length=32
    )


PER_HEAD: Final = {
    "modes": "<i4", "query_norm": "<f4", "key_norm": "<f4", "query_key_norm": "<f4", "risk": "<f4",
    "clip_factor": "<f4", "clipped_steps": "<f4",
}  # fmt: skip
"""Arrays of a sample with one number per head, [heads], and their dtypes. Positions are stored: only append."""


class Sample(Message):
    """Everything counted in the steps (since_step, step]. Heads are in the order of the boot's layers, flattened."""

    kind: Literal["sample"] = "sample"
    step: Step
    since_step: Step
    unix_seconds: UnixSeconds
    states: Array | None = Field(default=None, description="int64 words, [heads, slots of the sender's version]")
    modes: Array | None = Field(default=None, description="int32 mode flags, [heads]")
    query_norm: Array | None = Field(default=None, description="spectral norm of W_Q per head, float32 [heads]")
    key_norm: Array | None = Field(default=None, description="spectral norm of W_K per head, float32 [heads]")
    query_key_norm: Array | None = Field(default=None, description="spectral norm of W_Q W_K^T, float32 [heads]")
    loss: float | None = Field(default=None, description="mean raw loss over the steps that reported one")
    loss_nonfinite_steps: Count = 0
    grad_norm: float | None = Field(default=None, description="largest gradient norm of the steps")
    grad_norm_nonfinite_steps: Count = 0
    learning_rate: float | None = None
    step_seconds: float | None = Field(default=None, description="mean wall time of a step")
    agent_seconds: float | None = Field(default=None, description="mean host time of the agent in a step")
    risk: Array | None = Field(default=None, description="float32 in [0, 1], [heads]: how near a warning each head is")

    clip_factor: Array | None = Field(
        default=None, description="smallest gamma by which QK-Clip scaled each head's scores, float32 [heads]; 1: none"
    )
    clipped_steps: Array | None = Field(default=None, description="steps after which each was scaled, float32 [heads]")

    @field_validator("states")
    @classmethod
    def _states_have_slots(cls, value: Array | None) -> Array | None:
        if value is None:
            return value
        if value.dtype != "<i8" or len(value.shape) != 2 or not OLDEST_SLOT_COUNT <= value.shape[1] <= MOST_SLOTS:
            raise ValueError(
                f"states must be int64 of shape [heads, {OLDEST_SLOT_COUNT} to {MOST_SLOTS} slots], got {value.dtype} "
                f"{value.shape}"
            )
        return value

    @field_validator(*PER_HEAD)
    @classmethod
    def _one_number_per_head(cls, value: Array | None, info: ValidationInfo) -> Array | None:
        dtype = PER_HEAD[info.field_name or ""]
        if value is not None and (value.dtype != dtype or len(value.shape) != 1):
            raise ValueError(f"{info.field_name} must be {dtype} of shape [heads], got {value.dtype} {value.shape}")
        return value

    @model_validator(mode="after")
    def _steps_and_heads_agree(self) -> Self:
        if self.since_step > self.step:
            raise ValueError(f"since_step {self.since_step} is after step {self.step}")
        sizes = self.head_counts()
        if len(sizes) > 1:
            raise ValueError(f"the arrays of one sample have different numbers of heads: {sorted(sizes)}")
        return self

    def head_counts(self) -> set[int]:
        """Return the distinct numbers of heads in its arrays; empty if it has no arrays."""
        arrays = (self.states, *(getattr(self, name) for name in PER_HEAD))
        return {array.shape[0] for array in arrays if array is not None}

    def words(self) -> Words | None:
        """Return the head states, [heads, SLOT_COUNT], or None if this sample has none."""
        return None if self.states is None else fitted(self.states.numpy())


class Verdict(Message):
    """A result of the detectors for one head, or for the run if layer and head are None. It is active until cleared."""

    kind: Literal["verdict"] = "verdict"
    id: Identifier
    step: Step
    state: Literal["raised", "updated", "cleared"]
    severity: Severity
    layer: LayerNumber | None = None
    head: HeadNumber | None = None
    cause: Annotated[Cause, _other_if_newer(get_args(Cause))]
    signal: str = Field(max_length=64, description="the signal that tripped; monitor/detect/growth.py names them")
    evidence: Annotated[dict[Identifier, float], _at_most(32)] = Field(default_factory=dict, max_length=32)
    corrected_from: Annotated[IncidentCause, _other_if_newer(get_args(IncidentCause))] | None = Field(
        default=None, description="the cause that this warning was reported with before; null: none"
    )
    corrected_step: Step | None = Field(default=None, description="the step at which the cause was corrected")
    forecast_steps: float | None = Field(default=None, description="steps until the largest |score| reaches 512")
    forecast_low_steps: float | None = Field(
        default=None, description="the lowest estimate of it; there is no highest one, because some heads settle"
    )
    harm_in_sight: bool | None = Field(
        default=None, description="false: on its course the score levels off below 512; null: no forecast"
    )
    sentence: str = Field(max_length=500, description="the verdict in words")


Outcome = Literal["applied", "proposed", "refused", "expired", "dry_run"]


class Switched(Message):
    """The outcome of a command or of a local decision: the heads, with their modes before and after.

    A command, named by `command`, is answered exactly once. A local decision has no command.
    """

    kind: Literal["switched"] = "switched"
    id: Identifier
    step: Step
    command: Identifier | None = None
    verdict: Identifier | None = None
    outcome: Outcome
    heads: Annotated[tuple[HeadRef, ...], FailFast()] = Field(max_length=MAX_LAYERS * 64)
    before: Annotated[tuple[ReportedModeName, ...], FailFast()] = Field(max_length=MAX_LAYERS * 64)
    after: Annotated[tuple[ReportedModeName, ...], FailFast()] = Field(max_length=MAX_LAYERS * 64)
    reason: str = Field(max_length=500)

    @model_validator(mode="after")
    def _one_mode_per_head(self) -> Self:
        if not len(self.heads) == len(self.before) == len(self.after):
            raise ValueError("heads, before and after must have the same length")
        return self


class Clipped(Message):
    """QK-Clip was switched on or off (no heads), or scaled the weights of these heads since the previous event."""

    kind: Literal["clipped"] = "clipped"
    id: Identifier
    step: Step
    on: bool
    heads: Annotated[tuple[HeadRef, ...], FailFast()] = Field(default=(), max_length=MAX_LAYERS * 64)
    factors: Annotated[tuple[float, ...], FailFast()] = Field(
        default=(), max_length=MAX_LAYERS * 64, description="the smallest gamma of each head: its scores times gamma"
    )
    times: Annotated[tuple[Count, ...], FailFast()] = Field(
        default=(), max_length=MAX_LAYERS * 64, description="how many steps scaled each head"
    )
    total: Count = Field(default=0, description="how often heads were scaled so far, also before the run was resumed")
    reason: str = Field(max_length=500)

    @model_validator(mode="after")
    def _one_factor_per_head(self) -> Self:
        if not len(self.heads) == len(self.factors) == len(self.times):
            raise ValueError("heads, factors and times must have the same length")
        return self


class Checkpoint(Message):
    """The trainer wrote a checkpoint of the run as it was after step `step`."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: Step
    path: str = Field(min_length=1, max_length=1024, description="path or name by which the trainer loads it")
    trainer: str = Field(pattern="^[a-z_]{1,16}$", description="transformers, lightning, accelerate, torchtitan, own")
    requested: bool = Field(default=False, description="foreshock asked for it, at a warning")


class AgentHealth(Message):
    """Lost events and faults of the agent since its boot, as totals."""

    kind: Literal["health"] = "health"
    step: Step
    dropped: Annotated[dict[Identifier, Count], _at_most(256)] = Field(
        default_factory=dict, max_length=256, description="events lost, by reason"
    )
    faults: Annotated[dict[Identifier, Count], _at_most(256)] = Field(
        default_factory=dict, max_length=256, description="contained faults, by component"
    )


class Finished(Message):
    """Last event of a boot that ended without a crash."""

    kind: Literal["finished"] = "finished"
    step: Step
    unix_seconds: UnixSeconds
    status: Literal["completed", "failed", "stopped"]


class Unknown(Message):
    """Replaces an event of a kind that the reader does not know, sent by a newer version."""

    kind: Literal["unknown"] = "unknown"
    step: Step = 0
    name: str = Field(max_length=64, description="the kind of the original event")


Event = Annotated[
    Started | Sample | Verdict | Switched | Clipped | Checkpoint | AgentHealth | Finished | Unknown,
    Field(discriminator="kind"),
]


class Batch(Message):
    """The body of a POST to /v1/batches. Stored entirely or not at all."""

    wire: Literal[1] = 1
    run: Identifier
    rank: int = Field(ge=0, lt=10**6)
    boot: Identifier = Field(description="new at every process start of a rank")
    sequence: int = Field(ge=1, le=2**53)
    events: tuple[Event, ...] = Field(min_length=1, max_length=MAX_EVENTS)


def read_batch(body: bytes) -> Batch:
    """Parse a batch; events of unknown kinds become `Unknown`. Raises ValidationError if it is malformed."""
    try:
        return Batch.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MAX_EVENTS:  # there are other errors than unknown kinds; listing them costs 1 KB each
            raise
        found = error.errors(include_url=False, include_input=False)
        places = [e["loc"][1] for e in found if e["type"] == "union_tag_invalid" and e["loc"][:1] == ("events",)]
        content: dict[str, Any] = from_json(body) if places else {}
        if not all(isinstance(content["events"][place]["kind"], str) for place in places) or not places:
            raise
    for place in places:
        content["events"][place] = {"kind": "unknown", "name": content["events"][place]["kind"][:64]}
    return Batch.model_validate(content)


class Command(Message):
    """An order to the agent. Delivered at least once; the agent applies an id once.

    The agent refuses modes and kinds of orders that it does not know, with a reason.
    """

    id: Identifier
    action: Annotated[str, Field(max_length=32)] = "switch"
    heads: tuple[HeadRef, ...] | None = Field(
        default=None, max_length=MAX_LAYERS * 64, description="None means every head"
    )
    mode: ReportedModeName
    expect: ReportedModeName | None = Field(
        default=None, description="refuse unless every named head has this mode now"
    )
    reason: str = Field(max_length=500)
    issued_by: str = Field(max_length=128)
    expires_unix_seconds: float | None = None
    expires_step: Step | None = None
    dry_run: bool = False


class Ack(Message):
    """The service's answer to a batch: the confirmation that it is stored, and commands."""

    boot: Identifier
    acknowledged: int = Field(ge=0, description="the batch sequence that is now stored")
    commands: tuple[Command, ...] = Field(default=(), max_length=256)
    send_started: bool = Field(
        default=False, description="the service has no description of this process; send its `started` again"
    )


def head_refs(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Return the (layer, head) of every row of a sample's arrays, in order."""
    return [(layer.layer, head) for layer in layers for head in layer.heads]
