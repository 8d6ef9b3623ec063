"""The causes of warnings, one entry each: whoever knows the causes reads this list.

The order is that of the evidence which a cause takes, the most first. A warning is corrected when its evidence comes or
ends. Of causes that are active together the first gives the incident its name.
"""

from dataclasses import dataclass
from typing import Final, Literal

Cause = Literal["rounding", "score growth", "other"]
"""The cause that a verdict names."""
IncidentCause = Literal["rounding", "score growth", "not finite", "other"]
"""The cause that warnings are gathered by: what is not finite is a matter of its own (contract.decision.cause_of)."""

_CLIP: Final = ", or with attention='kernels' and qk_clip='always' where that is not on yet"
"""What holds scores that grow. It would cut what heads have learnt where rounding is the cause."""
LOWER: Final = "Lower the learning rate or lengthen its warm-up, and look at the data of these steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseInfo:
    """What is known of one cause."""

    reads: str
    """How an incident of it begins in words, before `in` and its heads."""
    shown_by: str
    """Key of the metric that shows it; what alerts and messages open is its chart."""
    resumed: str = "with a lower learning rate or a longer warm-up."
    """How a run that has ended is resumed from a checkpoint; `mitigation` is filled in."""
    done: str = "Nothing is switched: rounding could not be shown to be the cause, and a switch changes rounding alone."
    to_do: str = f"{LOWER}; if it goes on, resume from {{checkpoint}}."
    """What machines do where no remedy of theirs helps, and what is left to people; `checkpoint` is filled in."""
    to_do_of_warning: str = ""
    """What is left to people while the incident is a warning only; empty: the same."""
    curable: bool = False
    """Whether a switch of heads helps."""
    joins: bool = False
    """Causes that join are one incident while they are active at the same time."""


CAUSES: Final[dict[IncidentCause, CauseInfo]] = {
    "rounding": CauseInfo(
        reads="Rounding makes attention scores drift",
        shown_by="head.score_offset",
        resumed="with {mitigation} on every head from the start.",
        curable=True,
        joins=True,
    ),
    "score growth": CauseInfo(
        reads="Attention scores grow without a sign of rounding",
        shown_by="head.score_max",
        resumed=f"with a lower learning rate or a longer warm-up{_CLIP}.",
        to_do=f"{LOWER}; if it goes on, resume from {{checkpoint}}{_CLIP}.",
        joins=True,
    ),
    "not finite": CauseInfo(
        reads="Numbers are not finite",
        shown_by="run.loss",
        resumed="without the batches that led here, or with a lower learning rate.",
        done="Nothing is switched: no switch repairs what is not finite.",
        to_do="Stop the run, look at what the warning names, and resume from {checkpoint}; leave out the batches that "
        "led here, or lower the learning rate.",
        to_do_of_warning="Let the run continue and look at what the warning names, the mask, the loss scale and the "
        "batches of these steps.",
    ),
    "other": CauseInfo(reads="Something else failed", shown_by="run.loss"),
}


def incident_id(cause: IncidentCause) -> str:
    """The name of a cause's incident within its run."""
    return cause.replace(" ", "-")


def mates(cause: IncidentCause) -> frozenset[IncidentCause]:
    """The causes that are one incident with this one where they stand at one time."""
    return frozenset(one for one in CAUSES if one == cause or (CAUSES[one].joins and CAUSES[cause].joins))


def curable(cause: IncidentCause) -> bool:
    """Whether a switch can help."""
    return CAUSES[cause].curable
