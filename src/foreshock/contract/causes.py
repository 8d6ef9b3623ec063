"""The causes of warnings, one entry each: whoever knows the causes reads this list.

The order is that of the evidence which a cause takes, the most first. A warning is corrected when its evidence comes or
ends. Of causes that are active together the first gives the incident its name.
"""

from dataclasses import dataclass
from typing import Final, Literal

Cause = Literal["attention kernel", "rounding", "score growth", "other"]
"""The cause that a verdict names."""
IncidentCause = Literal["attention kernel", "rounding", "score growth", "not finite", "other"]
"""The cause that warnings are gathered by: what is not finite is a matter of its own (contract.decision.cause_of)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseInfo:
    """What is known of one cause."""

    reads: str
    """How an incident of it begins in words, before `in` and its heads."""
    shown_by: str
    """Key of the metric that shows it; what alerts and messages open is its chart."""
    curable: bool = False
    """Whether a switch of heads helps."""
    joins: bool = False
    """Causes that join are one incident while they are active at the same time."""


CAUSES: Final[dict[IncidentCause, CauseInfo]] = {
    "attention kernel": CauseInfo(reads="Attention computes wrong rows", shown_by="head.wrong_rows"),
    "rounding": CauseInfo(
        reads="Rounding makes attention scores drift", shown_by="head.score_offset", curable=True, joins=True
    ),
    "score growth": CauseInfo(
        reads="Attention scores grow without a sign of rounding", shown_by="head.score_max", joins=True
    ),
    "not finite": CauseInfo(reads="Numbers are not finite", shown_by="run.loss"),
    "other": CauseInfo(reads="Something else failed", shown_by="run.loss"),
}
"""What is done about each, and what people are asked for: contract.decision.TEXTS."""


def incident_id(cause: IncidentCause) -> str:
    """The name of a cause's incident within its run."""
    return cause.replace(" ", "-")


def mates(cause: IncidentCause) -> frozenset[IncidentCause]:
    """The causes that are one incident with this one where they stand at one time."""
    return frozenset(one for one in CAUSES if one == cause or (CAUSES[one].joins and CAUSES[cause].joins))


def curable(cause: IncidentCause) -> bool:
    """Whether a switch can help."""
    return CAUSES[cause].curable
