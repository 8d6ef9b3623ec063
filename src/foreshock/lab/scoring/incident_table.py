"""Incidents of many runs: how often people would have been called for nothing, and whether the right head was named."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from foreshock.lab.scoring.intervals import Interval, poisson_upper_bound, share_interval
from foreshock.lab.scoring.score import Score

Group = Literal["healthy", "treated", "did not fail", "failed", "other"]
GROUPS: Final[tuple[Group, ...]] = ("healthy", "treated", "did not fail", "failed", "other")
PER_STEPS: Final = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRow:
    """The runs of one split that ended alike."""

    split: str
    group: Group
    runs: int
    steps: int
    incidents: int
    undecided: int
    """of those of runs that did not fail: the harm was expected after the run's end. All others are false"""
    quiet_runs: int
    """without any incident"""
    quiet_interval: Interval | None
    """of their share, over runs, 95 %"""
    false_per_500k: float | None
    at_most_per_500k: float | None
    """exact Poisson bound, one-sided, 95 %"""
    named: int | None
    """of failed runs: the head that fails was among the first three as late as a warning is in time"""
    named_of: int
    """failed runs whose heads were recorded one by one"""
    named_interval: Interval | None
    causes_right: int | None
    """of failed runs with an incident by then"""
    causes: int


def group_of(score: Score) -> Group:
    """healthy: not harmed, and not made to fail, whatever its scores did. did not fail: made to fail by rounding, not
    harmed, and no |score| of 512."""
    if score.truth == "treated":
        return "treated"
    if score.truth == "healthy":
        return "other" if score.harm_step is not None else "healthy"
    if score.natural_rounding:
        return "did not fail" if score.harm_step is None and score.any_dangerous_step is None else "failed"
    return "other"


def incident_rows(scores: Sequence[Score]) -> list[IncidentRow]:
    """One row for each split and group that has runs."""
    return [
        _row(chosen, split, group)
        for split in sorted({each.split for each in scores}, reverse=True)
        for group in GROUPS
        if (chosen := [each for each in scores if each.split == split and group_of(each) == group])
    ]


def _row(scores: Sequence[Score], split: str, group: Group) -> IncidentRow:
    steps, count = sum(each.steps for each in scores), sum(len(each.incidents) for each in scores)
    quiet = sum(not each.incidents for each in scores)
    undecided = sum(
        incident.expected_step is not None and incident.expected_step > each.steps
        for each in scores
        for incident in each.incidents
        if group == "did not fail"
    )
    wrong = group in ("healthy", "treated", "did not fail") and steps > 0
    harmed = [each for each in scores if group == "failed" and each.harm_step is not None]
    reported = [each.told_in_time for each in harmed if each.told_in_time is not None]
    known = [each for each in harmed if each.failing_head is not None]
    named = sum(each.told_in_time is not None and each.failing_head in each.told_in_time.heads for each in known)
    return IncidentRow(
        split=split,
        group=group,
        runs=len(scores),
        steps=steps,
        incidents=count,
        undecided=undecided,
        quiet_runs=quiet,
        quiet_interval=share_interval(quiet, len(scores)),
        false_per_500k=(count - undecided) * PER_STEPS / steps if wrong else None,
        at_most_per_500k=poisson_upper_bound(count - undecided) * PER_STEPS / steps if wrong else None,
        named=named if known else None,
        named_of=len(known),
        named_interval=share_interval(named, len(known)),
        causes_right=sum(each.cause == "rounding" for each in reported) if reported else None,
        causes=len(reported),
    )
