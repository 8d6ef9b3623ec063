"""What an incident is: all warnings of a run of one cause, its heads, and who takes care of it."""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract.decision import Act, IncidentCause
from foreshock.contract.wire import HeadRef, Severity, Verdict

IncidentState = Literal["open", "acknowledged", "switched", "arrested", "not arrested", "closed"]
HeadState = Literal["unswitched", "switched", "arrested", "not arrested", "quiet"]


class Warned(NamedTuple):
    """A warning of a rank in its newest word."""

    rank: int
    raised_step: int
    verdict: Verdict

    @property
    def joined_step(self) -> int:
        """Since when it speaks of its cause."""
        corrected = self.verdict.corrected_step
        return self.raised_step if corrected is None else max(corrected, self.raised_step)


class Judged(NamedTuple):
    """What became of a switch: it speaks of every warning of its heads that was raised until `step`."""

    heads: frozenset[HeadRef] | None
    """None: every head."""
    step: int
    arrested: bool


class Acknowledged(BaseModel):
    """Somebody has seen an incident and takes care of it."""

    model_config = ConfigDict(frozen=True)
    cause: IncidentCause
    step: int = Field(description="the incident's newest step when it was acknowledged")
    who: str
    reason: str
    unix_seconds: float


class IncidentHead(BaseModel):
    """A head of an incident, or the whole run where layer and head are null. All ranks that speak of it together."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    layer: int | None
    head: int | None
    state: HeadState = Field(description="quiet: no warning stands any more; else where the cure of this head stands")
    severity: Severity
    signal: str
    raised_step: int
    step: int = Field(description="of its newest word")
    steps_left: float | None = Field(description="until the largest |score| reaches 512; 0 past it, null: not foreseen")
    harm_step: int | None = Field(description="the step at which that is expected")
    harm_first_step: int | None
    harm_last_step: int | None = Field(description="null beside an earliest step: nobody can say until when")
    harm_in_sight: bool | None = Field(description="false: on its course the head levels off before; null: no forecast")
    corrected_from: IncidentCause | None = Field(description="the cause that it was told under before")
    sentence: str
    evidence: dict[str, float]


class Incident(BaseModel):
    """All warnings of one cause in a run. `id` names it within its run: its cause, with a dash for a space."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    id: str
    cause: IncidentCause
    state: IncidentState
    severity: Severity = Field(description="of its worst head that is neither quiet nor arrested")
    opened_step: int = Field(
        description="the first warning; of a corrected incident under whatever cause that was told"
    )
    corrected_from: IncidentCause | None = Field(description="the cause that the incident was told under before")
    corrected_step: int | None = Field(description="the step at which its cause was corrected")
    step: int = Field(description="of its newest word")
    closed_step: int | None
    times: int = Field(description="how often it has opened in this run")
    standing: int = Field(description="heads that are warned about now; the whole run counts as one")
    switched: int = Field(description="how many of them have a mode under which growth by rounding ends")
    layers: list[int] = Field(description="of the heads that stand, or of all where none does")
    steps_left: float | None = Field(description="of the head that comes to harm first")
    harm_step: int | None
    harm_first_step: int | None
    harm_last_step: int | None
    heads: list[IncidentHead] = Field(description="soonest harm first; quiet ones last")
    acknowledged: Acknowledged | None
    act: Act = Field(description="what machines do about it under the run's policy: switch, propose or none")
    sentence: str = Field(description="the incident in words")
    done: str = Field(description="what was done about it, in words")
    to_do: str = Field(description="what is left to people, in words")

    @property
    def standing_heads(self) -> int:
        """Heads that are warned about now; 0 where the whole run alone is."""
        return sum(head.layer is not None and head.state != "quiet" for head in self.heads)

    @property
    def first(self) -> IncidentHead:
        """The head to look at first."""
        return self.heads[0]
