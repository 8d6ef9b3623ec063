"""Forecasts of many heads at once beside the same worked out one by one, and the horizon that a warning may ask for."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.test_detectors import HEADS, SICK, explosion, healthy, line, play, raised

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import forecast, forecasts
from foreshock.monitor.detect.growth import Growth
from foreshock.monitor.detect.signals import SIGNALS, HeadSignal

WIDTH = len(SIGNALS)
numbers = st.one_of(st.floats(-600.0, 600.0), st.sampled_from([0.0, 512.0, math.nan, 1e-9]))
"""Blocks hold no infinite value: what is not finite enters them as NaN."""
head = st.lists(numbers, min_size=3 * WIDTH, max_size=3 * WIDTH)


def one_by_one(growth: Growth, index: int) -> tuple[float, float, float] | None:
    """Likely, earliest and latest, as the definition has them; None where no end shows."""
    score = float(growth.end[HeadSignal.SCORE, index])
    if not math.isfinite(score):
        return None
    if score >= 512:
        return 0.0, 0.0, 0.0
    offset = abs(float(growth.end[HeadSignal.OFFSET, index]))
    found = []
    for signal, target in ((HeadSignal.OFFSET, offset + 512 - score), (HeadSignal.SCORE, 512.0)):
        sign = math.copysign(1.0, float(growth.end[signal, index]))
        parts = (growth.start[signal, index], growth.middle((signal, index)), growth.end[signal, index])
        start, middle, end = (sign * float(part) for part in parts)
        newer, older = end - middle, middle - start
        if not newer > 0 or not float(growth.sigmas((signal, index))) >= 2.0:
            continue
        steps_of_line = (target - end) / newer * growth.steps / 2
        curve = math.log(target / end) / math.log(end / middle) * growth.steps / 2 if middle > 0 else steps_of_line
        likely = curve if older > 0 and newer >= 1.2 * older else math.sqrt(steps_of_line * curve)
        found.append((likely, 0.5 * min(steps_of_line, curve), 1.5 * max(steps_of_line, curve)))
    return min(found, key=lambda steps: steps[0]) if found else None


def grown(heads: list[list[float]]) -> Growth:
    values: Floats = np.array(heads).reshape(len(heads), 3, WIDTH).transpose(1, 2, 0)
    jitter = np.full((WIDTH, len(heads)), 1e-4)
    return Growth(values[0], values[2], 2000.0, [values[1]], jitter, 1)


@given(st.lists(head, min_size=1, max_size=6))
def test_forecasts_of_many_heads_are_those_of_each(heads: list[list[float]]) -> None:
    with np.errstate(all="ignore"):
        growth = grown(heads)
        told = forecasts(growth, np.arange(len(heads)))
        for index in range(len(heads)):
            try:
                expected = one_by_one(growth, index)
            except (ZeroDivisionError, ValueError, OverflowError):  # where Python has no number, numpy has inf or NaN
                continue
            if expected is None or not math.isfinite(expected[0]):
                assert not math.isfinite(told[0, index])
                assert forecast(growth, index) == (None, None, None)
            else:
                assert told[:, index].tolist() == pytest.approx(expected, rel=1e-9)
                assert forecast(growth, index) == pytest.approx(expected, rel=1e-9)


def test_a_warning_may_be_asked_to_foresee_harm_within_some_times_the_life_of_the_run() -> None:
    """A drift of 1.5 nats in a thousand steps is worth none then; one that doubles is warned about as before."""
    near = DetectorConfig(horizon_lives=3.0)
    _, slow = play(line, until=9000, bias=0.6, detectors=Detectors(HEADS, near))
    assert slow == []
    _, shipped = play(explosion, until=5500, bias=0.6)
    detectors, told = play(explosion, until=5500, bias=0.6, detectors=Detectors(HEADS, near))
    assert raised(told) == raised(shipped) == [HEADS[SICK]]
    assert told[0].step - shipped[0].step <= 400
    assert told[0].forecast_steps is not None
    assert told[0].forecast_steps <= 3 * told[0].step
    assert detectors.risk[SICK] == 1.0


def test_the_risk_of_a_head_is_no_larger_than_its_harm_is_near() -> None:
    course, near = line, DetectorConfig(horizon_lives=1.0)
    far, _ = play(course, until=6000, bias=0.6, detectors=Detectors(HEADS, near))
    shipped, _ = play(course, until=6000, bias=0.6)
    assert shipped.risk[SICK] == 1.0
    assert 0.0 < far.risk[SICK] < 0.5
    assert (far.risk <= shipped.risk).all()


def test_heads_whose_scores_were_not_recorded_are_not_held_back() -> None:
    def unscored(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        return offset, np.full_like(score, math.nan)

    _, told = play(unscored, until=6000, bias=0.6, detectors=Detectors(HEADS, DetectorConfig(horizon_lives=0.1)))
    assert raised(told) == [HEADS[SICK]]
    _, quiet = play(healthy, until=6000, detectors=Detectors(HEADS, DetectorConfig(horizon_lives=0.1)))
    assert quiet == []
