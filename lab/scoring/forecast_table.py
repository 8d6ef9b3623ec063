"""How long warned heads took to a |score| of 512, in parts of their course: what the ranges of forecasts are made of.

The parts of the shipped forecast (`foreshock.monitor.detect.forecast.CAME`) are the first, middle and last of those of
the tuning runs. So that their worth is not judged by the heads they were taken from, each recipe is also judged by the
parts of all others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.calibration import checked
from foreshock.lab.scoring.score import split
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import CAME

SHIPPED: Final = "all, by the shipped parts"


@dataclass(frozen=True, slots=True)
class Took:
    """A word about a head that was ahead of 512: how long that took, or for how long it was not there yet."""

    recipe: str
    run: str
    head: tuple[int, int]
    first: bool
    """the first word about this head"""
    part: float
    """of its course: until it was there, or as long as it was seen"""
    came: bool
    open_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRow:
    """Forecasts of the heads of one recipe, by the parts that all other recipes give."""

    recipe: str
    earliest: float
    likely: float
    latest: float
    heads: int
    """that came to 512 after they had been warned about"""
    forecasts: int
    inside: int
    first_inside: int
    """of the first words about these heads"""
    passed: int
    """forecasts of heads that had not come when the latest step had passed, though it was given"""


def took(traces: Sequence[Trace], on_trace: Callable[[Trace], None] = lambda trace: None) -> list[Took]:
    """Every word about heads on their way to 512, on the tuning runs among `traces`, as the shipped detectors say it.

    Raises ValueError where no tuning run is given.
    """
    tuning = [trace for trace in traces if split(trace) == "tuning"]
    if not tuning:
        raise ValueError("none of these runs is for tuning; forecasts are calibrated on no held-out run")
    found = []
    for trace in tuning:
        found += _took(trace)
        on_trace(trace)
    return found


def _took(trace: Trace) -> list[Took]:
    detectors = Detectors(trace.heads, DetectorConfig())
    told = []
    for reading in readings(trace):
        told += detectors.update(replace(reading, rounds=True))  # no run is told that it is a control
    found = []
    seen: set[tuple[int, int]] = set()
    for each in checked(trace, [verdict for verdict in told if verdict.state != "cleared"]):
        ref = (each.layer, each.head)
        if each.likely and each.outcome != "past":
            course = each.likely / CAME[1]
            until = (each.reached_step or each.seen_until) - each.step
            recipe = str(trace.header.get("recipe", ""))
            came = each.reached_step is not None
            found.append(Took(recipe, str(trace.path), ref, ref not in seen, until / course, came, each.open_ended))
            seen.add(ref)
    return found


def forecast_rows(words: Sequence[Took]) -> list[ForecastRow]:
    """A row for each recipe whose heads came to 512, and one for all of them by the shipped parts.

    Raises ValueError where heads of fewer than two recipes came.
    """
    came = [each for each in words if each.came]
    recipes = sorted({each.recipe for each in came})
    if len(recipes) < 2:
        raise ValueError("heads of fewer than two recipes came to a score of 512; none can be judged by the others")
    rows = []
    for recipe in recipes:
        others = [each.part for each in came if each.recipe != recipe]
        parts = min(others), median(others), max(others)
        rows.append(_row(recipe, parts, [each for each in words if each.recipe == recipe]))
    return [*rows, _row(SHIPPED, CAME, words)]


def _row(recipe: str, parts: tuple[float, float, float], words: Sequence[Took]) -> ForecastRow:
    came = [each for each in words if each.came]
    inside = [each for each in came if parts[0] <= each.part and (each.open_ended or each.part <= parts[2])]
    return ForecastRow(
        recipe=recipe,
        earliest=parts[0],
        likely=parts[1],
        latest=parts[2],
        heads=len({(each.run, each.head) for each in came}),
        forecasts=len(came),
        inside=len(inside),
        first_inside=sum(each.first for each in inside),
        passed=sum(not each.came and not each.open_ended and each.part > parts[2] for each in words),
    )
