"""How often a forecast held: every first warning of a head against when its |score| did reach 512."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from foreshock.contract.wire import HeadRef, Verdict
from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.intervals import share_interval
from foreshock.monitor.detect.signals import DANGEROUS_SCORE

Outcome = Literal["inside", "earlier", "later", "undecided", "none in sight, right", "none in sight, wrong", "past"]
OUTCOMES: Final[tuple[Outcome, ...]] = (
    "inside",
    "earlier",
    "later",
    "undecided",
    "none in sight, right",
    "none in sight, wrong",
    "past",
)
"""later: the whole range passed without it. undecided: the run ended within the range. past: it was there already."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was foreseen at the first warning about a head, and what came."""

    step: int
    layer: int
    head: int
    likely: float | None
    low: float | None
    high: float | None
    reached_step: int | None
    outcome: Outcome


def forecasts_of(trace: Trace, verdicts: Iterable[Verdict]) -> list[Forecast]:
    """One for each head, at its first warning."""
    first: dict[HeadRef, Verdict] = {}
    for verdict in verdicts:
        if verdict.layer is not None and verdict.head is not None and verdict.state == "raised":
            first.setdefault((verdict.layer, verdict.head), verdict)
    reached = _reached(trace) if first else {}
    end = trace.samples[-1].step
    return [
        Forecast(
            verdict.step,
            *ref,
            verdict.forecast_steps,
            verdict.forecast_low_steps,
            verdict.forecast_high_steps,
            reached.get(ref),
            _outcome(verdict, reached.get(ref), end),
        )
        for ref, verdict in first.items()
    ]


def _reached(trace: Trace) -> Mapping[HeadRef, int]:
    """When the |score| of each head reached 512."""
    found: dict[HeadRef, int] = {}
    for reading in readings(trace):
        score = np.fmax(reading.row_max_abs, reading.score_max)
        for index in np.flatnonzero(score >= DANGEROUS_SCORE).tolist():
            found.setdefault(trace.heads[index], reading.step)
    return found


def _outcome(verdict: Verdict, reached: int | None, end: int) -> Outcome:
    low, high = verdict.forecast_low_steps, verdict.forecast_high_steps
    if reached is not None and reached <= verdict.step:
        return "past"
    if low is None or high is None:
        return "none in sight, right" if reached is None else "none in sight, wrong"
    came = math.inf if reached is None else reached - verdict.step
    if came < low:
        return "earlier"
    if came <= high:
        return "inside"
    return "undecided" if reached is None and end - verdict.step <= high else "later"


def calibration(forecasts: Iterable[Forecast]) -> dict[str, Any]:
    """Counts by outcome; the share of the decided ranges that held, with its interval. Heads of one run are not
    independent: of many heads of few runs the interval is too narrow."""
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
