"""What an incident is: all warnings of a run of one cause, its heads, and who takes care of it; and how it reads.

The words are the same on the terminal, on the page, in messages and in alerts.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract.causes import CAUSES, IncidentCause
from foreshock.contract.decision import Act, Ask
from foreshock.contract.orders import Ordered
from foreshock.contract.wire import HeadRef, Severity, Verdict

IncidentState = Literal["open", "acknowledged", "switched", "arrested", "not arrested", "closed"]
HeadState = Literal["unswitched", "switched", "arrested", "not arrested", "quiet"]


class Warned(NamedTuple):
    """A warning of a rank in its newest word."""

    rank: int
    raised_step: int
    verdict: Verdict
    rejected: bool = False
    """Whether a person rejected a switch while it stood."""

    @property
    def joined_step(self) -> int:
        """Since when it speaks of its cause."""
        corrected = self.verdict.corrected_step
        return self.raised_step if corrected is None else max(corrected, self.raised_step)


class SwitchOutcome(NamedTuple):
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
    causes: list[IncidentCause] = Field(description="why it is warned about; several where ranks report different ones")
    state: HeadState = Field(description="quiet: no warning stands any more; else where the cure of this head stands")
    severity: Severity
    signal: str
    raised_step: int
    step: int = Field(description="of its newest word")
    steps_left: float | None = Field(description="until the largest |score| reaches 512; 0 past it, null: not foreseen")
    harm_step: int | None = Field(description="the step at which that is expected")
    harm_first_step: int | None
    harm_last_step: int | None = Field(description="null beside an earliest step: nobody can say until when")
    harm_in_sight: bool | None = Field(description="false: on its course it stays below 512; null: no forecast")
    corrected_from: IncidentCause | None = Field(description="the cause that it was reported under before")
    sentence: str
    evidence: dict[str, float]


class Incident(BaseModel):
    """All warnings of one cause in a run, or of rounding and score growth where both stood at one time.

    `id` names it within its run: its cause, with a dash for a space.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", json_schema_serialization_defaults_required=True)
    id: str
    cause: IncidentCause = Field(description="the first of `causes`")
    causes: list[IncidentCause] = Field(description="every cause that its warnings have")
    state: IncidentState
    severity: Severity = Field(description="of its worst head that is neither quiet nor arrested")
    opened_step: int = Field(
        description="the first warning; of a corrected incident under whatever cause that was reported"
    )
    corrected_from: IncidentCause | None = Field(description="the cause that the incident was reported under before")
    corrected_step: int | None = Field(description="the step at which its cause was corrected")
    step: int = Field(description="of its newest word")
    closed_step: int | None
    times: int = Field(description="how often it has opened in this run")
    standing: int = Field(description="heads that are warned about now; the whole run counts as one")
    switched: int = Field(description="how many of those that rounding drives have a mode under which that ends")
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
    ask: Ask = Field(description="what that asks for: to approve `order`, to order a switch, or neither")
    order: Ordered | None = Field(description="the newest order for its heads, or the proposal that waits")

    @property
    def standing_heads(self) -> int:
        """Heads that are warned about now; 0 where the whole run alone is."""
        return sum(head.layer is not None and head.state != "quiet" for head in self.heads)

    @property
    def first(self) -> IncidentHead:
        """The head to look at first."""
        return self.heads[0]


NAMED_HEADS: Final = 3
"""The number of heads that are named one by one; of more, only a count is given."""


def sentence(
    causes: Sequence[IncidentCause],
    heads: Sequence[IncidentHead],
    standing: Sequence[IncidentHead],
    opened: int,
    was: IncidentCause | None,
    corrected: int,
) -> str:
    shown = standing or heads
    parts = [(CAUSES[cause].reads, [head for head in shown if cause in head.causes]) for cause in causes]
    named = [f"{words} in {in_words(own)}" for words, own in parts if own]
    text = f"{', and '.join([named[0], *(f'{one[0].lower()}{one[1:]}' for one in named[1:])])}, since step {opened:,}."
    if was is not None:
        text += f" Corrected: until step {corrected:,} this was reported as {was}."
    if not standing:
        return f"{text} Quiet since step {max(head.step for head in heads):,}."
    first = shown[0]
    if (
        first.layer is None
        and was is None
        and (first.signal == "nonfinite" or (first.signal == "level" and len(shown) < 2))
    ):
        return first.sentence  # it names place, extent and harm
    if first.layer is not None and len(shown) > 1:
        text += f" First: {name_of(first)}."
    return text if first.state == "arrested" else text + harm_in_words(first)


def harm_in_words(head: IncidentHead) -> str:
    """When a head's largest |score| reaches 512, as a sentence after another; empty where nobody can say."""
    if head.harm_step is None:
        slows = " Its growth slows down: on this course its largest |score| stays below 512."
        return slows if head.harm_in_sight is False else ""
    if head.harm_step <= head.step:
        return " Its largest |score| is past 512."
    between = ""
    if head.harm_first_step is not None and head.harm_last_step is not None:
        between = f" ({_round(head.harm_first_step)} to {_round(head.harm_last_step)})"
    elif head.harm_first_step is not None:
        between = f" (not before {_round(head.harm_first_step)})"
    return f" Its largest |score| reaches 512 about step {_round(head.harm_step)}{between}."


def _round(step: int) -> str:
    """A forecast is not known to the step: three digits."""
    unit = 10 ** max(0, len(str(step)) - 3)
    return f"{round(step / unit) * unit:,}"


def name_of(head: IncidentHead) -> str:
    """Layer 0 head 2, in small letters."""
    if head.layer is None:
        return "the whole run"
    return f"layer {head.layer}" + ("" if head.head is None else f" head {head.head}")


def counted(heads: Sequence[IncidentHead]) -> str:
    """How many heads these are; the whole run is none of them."""
    named = sum(head.layer is not None for head in heads)
    whole = ["the whole run"] if named < len(heads) else []
    return " and ".join(whole + [f"{named} head{'s' if named > 1 else ''}"] * (named > 0))


def in_words(heads: Sequence[IncidentHead]) -> str:
    """How many heads of which layers; a few by name."""
    if len(heads) <= NAMED_HEADS:
        return " and ".join(filter(None, [", ".join(map(name_of, heads[:-1])), name_of(heads[-1])]))
    layers = sorted({head.layer for head in heads if head.layer is not None})
    return f"{counted(heads)} of {'layer' if len(layers) == 1 else 'layers'} {_ranges(layers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 3, 7; at most four parts."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    named = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts]
    return ", ".join(named[:4]) + (f" and {len(numbers) - sum(map(len, parts[:4]))} more" if len(named) > 4 else "")


def page_of(url: str, *runs: str) -> str:
    """The address of the live page that shows these runs of the service at `url`, at least one."""
    return f"{url.rstrip('/')}/?runs={quote(','.join(runs), safe='/:,')}"
