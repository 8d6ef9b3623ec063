"""How often a forecast held: what was foreseen of a head against when its |score| did reach 512."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from foreshock.contract.wire import HeadRef, Verdict
from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.intervals import share_interval
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE

Outcome = Literal[
    "inside", "earlier", "later", "undecided", "none in sight, right", "none in sight, wrong", "no forecast", "past"
]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
"""later: the whole range passed without it. undecided: the run ended within the range, or the head was switched. past:
it was there already. A range without a latest step is never too early for what does not come."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was foreseen of a head, and what came."""

    step: int
    layer: int
    head: int
    likely: float | None
    low: float | None
    high: float | None
    reached_step: int | None
    outcome: Outcome
    seen_until: int
    """the last step at which the head was as it was foreseen: the run's, or that before it was switched"""


def forecasts_of(trace: Trace, verdicts: Iterable[Verdict]) -> list[Forecast]:
    """One for each head, at its first warning."""
    first: dict[HeadRef, Verdict] = {}
    for verdict in verdicts:
        if verdict.layer is not None and verdict.head is not None and verdict.state == "raised":
            first.setdefault((verdict.layer, verdict.head), verdict)
    return checked(trace, first.values())


def checked(trace: Trace, verdicts: Iterable[Verdict]) -> list[Forecast]:
    """Every word about a head, against what came."""
    asked = [v for v in verdicts if v.layer is not None and v.head is not None]
    if not asked:
        return []
    found = []
    reached, switches = _courses(trace)
    for verdict in asked:
        ref = (verdict.layer or 0, verdict.head or 0)
        until = next((step for step in switches.get(ref, ()) if step > verdict.step), trace.samples[-1].step)
        came = reached.get(ref)
        came = None if came is None or came > until else came
        outcome = _outcome(verdict, came, until)
        ahead = verdict.forecast_steps, verdict.forecast_low_steps, verdict.forecast_high_steps
        found.append(Forecast(verdict.step, *ref, *ahead, came, outcome, until))
    return found


def _courses(trace: Trace) -> tuple[Mapping[HeadRef, int], Mapping[HeadRef, list[int]]]:
    """When the |score| of each head reached 512, and the last steps before its mode changed."""
    reached: dict[HeadRef, int] = {}
    switches: dict[HeadRef, list[int]] = {}
    before = None
    for reading in readings(trace):
        for index in np.flatnonzero(reading.largest_score >= DANGEROUS_SCORE).tolist():
            reached.setdefault(trace.heads[index], reading.step)
        if before is not None:
            for index in np.flatnonzero(reading.modes != before.modes).tolist():
                switches.setdefault(trace.heads[index], []).append(before.step)
        before = reading
    return reached, switches


def _outcome(verdict: Verdict, reached: int | None, end: int) -> Outcome:
    low, high = verdict.forecast_low_steps, verdict.forecast_high_steps
    if reached is not None and reached <= verdict.step:
        return "past"
    if low is None:
        if verdict.harm_in_sight is None:
            return "no forecast"
        return "none in sight, right" if reached is None else "none in sight, wrong"
    high = math.inf if high is None else high
    came = math.inf if reached is None else reached - verdict.step
    if came < low:
        return "earlier"
    if came <= high and reached is not None:
        return "inside"
    return "undecided" if reached is None and end - verdict.step <= high else "later"


def calibration(forecasts: Iterable[Forecast]) -> dict[str, Any]:
    """Counts by outcome; the share of the decided ranges that held, with its interval, of all and of those that give a
    latest step. Heads of one run are not independent: of many heads of few runs the interval is too narrow."""
    given = list(forecasts)
    return {**_counted(given), "with_latest": _counted([each for each in given if each.high is not None])}


def _counted(forecasts: Iterable[Forecast]) -> dict[str, Any]:
    counts = dict.fromkeys(OUTCOMES, 0)
    for each in forecasts:
        counts[each.outcome] += 1
    decided = counts["inside"] + counts["earlier"] + counts["later"]
    return {
        "outcomes": counts,
        "decided": decided,
        "share_inside": counts["inside"] / decided if decided else None,
        "share_inside_interval": share_interval(counts["inside"], decided),
    }
