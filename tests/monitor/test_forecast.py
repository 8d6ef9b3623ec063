"""Forecasts of many heads at once, against a scalar reference, and the horizon within which a drift warns."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.monitor.synthetic_heads import (
    FAILING,
    HEADS,
    NO_HORIZON,
    explosion,
    healthy,
    play,
    raised,
    slow_drift,
)

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import courses, halves_until
from foreshock.monitor.detect.growth import Growth, HeadSignal
from foreshock.monitor.detect.verdicts import Finding, verdict

WIDTH = len(HeadSignal)
special = st.sampled_from([0.0, 512.0, math.nan, 1e-9])
"""Blocks store nonfinite values as NaN, so infinity does not occur."""
offset_and_score = (st.floats(-600.0, 600.0) | special, st.floats(0.0, 600.0) | special)
"""A largest |score| is never negative."""
head = st.tuples(*offset_and_score * 3).map(list)
"""Offset and score at the start, in the middle and at the end of the window."""


def reference_forecast(growth: Growth, index: int) -> float:
    """The steps until a head reaches 512, straight from the definition."""
    score = float(growth.end[HeadSignal.SCORE, index])
    if not math.isfinite(score):
        return math.nan
    if score >= 512:
        return 0.0
    offset = abs(float(growth.end[HeadSignal.OFFSET, index]))
    found = []
    for signal, target in ((HeadSignal.OFFSET, offset + 512 - score), (HeadSignal.SCORE, 512.0)):
        sign = math.copysign(1.0, float(growth.end[signal, index]))
        start, middle, end = (sign * float(part[signal, index]) for part in (growth.start, growth.middle, growth.end))
        error = float(growth.error()[signal, index])
        if not end > middle or not (end - start) / (math.sqrt(2.0) * error) >= 2.0:
            continue
        found.append(until(target, start, middle, end, error) * growth.steps / 2)
    return min(found, default=math.inf)


def until(target: float, start: float, middle: float, end: float, error: float = 0.0) -> float:
    """The forecast of one head, in halves of the window."""
    return float(halves_until(*(np.array(each) for each in (target, start, middle, end, error))))


def grown(heads: list[list[float]]) -> Growth:
    values: Floats = np.array(heads).reshape(len(heads), 3, WIDTH).transpose(1, 2, 0)
    start, middle, end = values
    error = np.full((WIDTH, len(heads)), 1e-2)
    return Growth(start, middle, end, end, error**2, 1, steps=2000.0, older=1000.0, newer=1000.0, held=4000, age=4000)


@given(st.lists(head, min_size=1, max_size=6))
def test_forecasts_of_many_heads_equal_the_scalar_reference(heads: list[list[float]]) -> None:
    with np.errstate(all="ignore"):
        growth = grown(heads)
        expected = [reference_forecast(growth, index) for index in range(len(heads))]
        np.testing.assert_allclose(courses(growth, np.arange(len(heads))), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("course", "ending"),
    [
        (6000.0, " in about 3,600 steps (840 at the earliest, if it continues)."),
        (0.0, " Its largest |score| is past 512."),
        (math.inf, " Its growth slows down: on this course its largest |score| stays below 512."),
        (1e9, " Its growth slows down: on this course its largest |score| stays below 512."),
        (math.nan, "the cause looks like rounding."),
    ],
)
def test_verdict_sentence_ends_with_its_forecast(course: float, ending: str) -> None:
    evidence = {"offset": 9.0, "offset_before": 4.0, "window_steps": 100.0}
    found = verdict(Finding("offset", "rounding", "warning"), evidence, course, step=100, of=(1, 2), before=None)
    assert found.sentence.endswith(ending)
    assert found.harm_in_sight == (None if math.isnan(course) else course < 1e9)


@given(older=st.floats(0.1, 10.0), newer=st.floats(0.1, 10.0), left=st.floats(0.1, 50.0))
def test_growth_proportional_to_the_rate_is_forecast_at_the_current_rate(
    older: float, newer: float, left: float
) -> None:
    end = 512.0 - left
    middle = end - newer
    values = [np.full((WIDTH, 1), each) for each in (middle - older, middle, end, end, 1e-9)]
    start, half, now, last, error = values
    growth = Growth(start, half, now, last, error**2, 1, 2000.0, 1000.0 * older, 1000.0 * newer, 4000, 4000)
    assert float(courses(growth, np.array([0]))[0]) == pytest.approx(1000.0 * left, rel=1e-3)


now = st.floats(1.0, 100.0)
"""The growth so far."""
far = st.floats(2.0, 500.0)
"""The target, as a multiple of the current value."""


@given(level=st.floats(-50.0, 0.0), grown=now, doublings=st.floats(0.2, 6.0), far=far)
def test_exponential_growth_from_zero_or_below_is_forecast_exactly(
    level: float, grown: float, doublings: float, far: float
) -> None:
    start, middle, end = (level + grown / 2 ** (doublings * back) for back in (2, 1, 0))
    assume(end > 0.1)
    likely = until(far * end, start, middle, end)
    assert likely == pytest.approx(math.log2((far * end - level) / grown) / doublings, rel=1e-5)


@given(level=st.floats(0.1, 50.0), grown=now, doublings=st.floats(0.2, 6.0), far=far)
def test_exponential_growth_above_a_level_is_never_forecast_too_early(
    level: float, grown: float, doublings: float, far: float
) -> None:
    start, middle, end = (level + grown / 2 ** (doublings * back) for back in (2, 1, 0))
    actual = math.log2((far * end - level) / grown) / doublings
    assert until(far * end, start, middle, end) >= actual * (1 - 1e-6)


@given(start=st.floats(-20.0, 20.0), gained=st.floats(0.5, 50.0), ratio=st.floats(0.05, 0.95), far=far)
def test_saturating_growth_is_forecast_exactly_and_never_beyond_its_ceiling(
    start: float, gained: float, ratio: float, far: float
) -> None:
    middle, end = start + gained, start + gained * (1 + ratio)
    ceiling = end + gained * ratio**2 / (1 - ratio)
    assume(end > 0.1)
    never = until(ceiling + far, start, middle, end)
    assert math.isinf(never)
    part = 1 / far  # share of the remaining growth
    soon = until(end + part * (ceiling - end), start, middle, end)
    assert soon == pytest.approx(math.log(1 - part) / math.log(ratio), rel=1e-5)


@given(
    heights=st.tuples(st.floats(-50.0, 50.0), st.floats(-50.0, 50.0), st.floats(0.1, 50.0)),
    error=st.floats(0.0, 1.0),
    far=far,
    exponent=st.integers(-40, 40),
)
def test_unit_does_not_change_the_forecast(
    heights: tuple[float, float, float], error: float, far: float, exponent: int
) -> None:
    """The time scale does not matter either: a forecast is a number of halves of the window."""
    assume(heights[2] > heights[1])
    unit = 2.0**exponent
    start, middle, end = heights
    plain = until(far * end, start, middle, end, error)
    scaled = until(far * end * unit, start * unit, middle * unit, end * unit, error * unit)
    np.testing.assert_allclose(scaled, plain, rtol=1e-9)


@given(
    start=st.floats(-20.0, 20.0),
    gained=st.floats(1.0, 50.0),
    far=far,
    noise=st.tuples(*[st.floats(-1.0, 1.0)] * 3),
)
def test_noise_within_one_standard_error_keeps_the_forecast_linear(
    start: float, gained: float, far: float, noise: tuple[float, float, float]
) -> None:
    """Errors with the sign of the curvature add up to 2 % of the change, less than a significant curvature."""
    error = 0.02 * gained
    true = (start, start + gained, start + 2 * gained)
    start, middle, end = (value + 0.7 * error * each for value, each in zip(true, noise, strict=True))
    assume(end > 0.1)
    likely = until(far * end, start, middle, end, error)
    assert likely == pytest.approx((far - 1) * end / (end - middle), rel=1e-9)


def test_drift_warns_only_if_its_harm_is_within_the_horizon() -> None:
    """By default, 1.5 nats per thousand steps do not warn, but a drift that doubles does."""
    far, verdicts = play(slow_drift, until=9000, bias=0.6)
    no_horizon, no_horizon_verdicts = play(slow_drift, until=9000, bias=0.6, detectors=Detectors(HEADS, NO_HORIZON))
    assert (verdicts, raised(no_horizon_verdicts)) == ([], [HEADS[FAILING]])
    assert 0.0 < far.risk[FAILING] < 0.5
    assert no_horizon.risk[FAILING] == 1.0
    assert (far.risk <= no_horizon.risk).all()
    _, no_horizon_doubling = play(explosion, until=5500, bias=0.6, detectors=Detectors(HEADS, NO_HORIZON))
    doubling, verdicts = play(explosion, until=5500, bias=0.6)
    assert raised(verdicts) == raised(no_horizon_doubling) == [HEADS[FAILING]]
    assert verdicts[0].step - no_horizon_doubling[0].step <= 400
    assert verdicts[0].forecast_steps is not None
    assert verdicts[0].forecast_steps <= 6 * verdicts[0].evidence["window_steps"]
    assert doubling.risk[FAILING] == 1.0


def test_heads_without_recorded_scores_warn_regardless_of_the_horizon() -> None:
    def without_scores(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        return offset, np.full_like(score, math.nan)

    _, verdicts = play(
        without_scores, until=6000, bias=0.6, detectors=Detectors(HEADS, DetectorConfig(horizon_windows=0.2))
    )
    assert raised(verdicts) == [HEADS[FAILING]]
    _, quiet = play(healthy, until=6000, detectors=Detectors(HEADS, DetectorConfig(horizon_windows=0.2)))
    assert quiet == []
