"""Forecasts of many heads at once beside the same worked out one by one, and the horizon that a warning may ask for."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.monitor.courses import (
    HEADS,
    HOWEVER_FAR,
    SICK,
    creep,
    explosion,
    healthy,
    play,
    raised,
)

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import courses, halves_until
from foreshock.monitor.detect.growth import Growth, HeadSignal
from foreshock.monitor.detect.verdicts import Finding, verdict

WIDTH = len(HeadSignal)
special = st.sampled_from([0.0, 512.0, math.nan, 1e-9])
"""Blocks hold no infinite value: what is not finite enters them as NaN."""
offset_and_score = (st.floats(-600.0, 600.0) | special, st.floats(0.0, 600.0) | special)
"""A largest |score| is the largest of absolute values: none is below zero, and no course leads there from below."""
head = st.tuples(*offset_and_score * 3).map(list)
"""Offset and score at the start, in the middle and at the end of the window."""


def one_by_one(growth: Growth, index: int) -> float:
    """The steps that a head's course takes, as the definition has them."""
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
    """Of one head, in halves of the window."""
    return float(halves_until(*(np.array(each) for each in (target, start, middle, end, error))))


def grown(heads: list[list[float]]) -> Growth:
    values: Floats = np.array(heads).reshape(len(heads), 3, WIDTH).transpose(1, 2, 0)
    start, middle, end = values
    error = np.full((WIDTH, len(heads)), 1e-2)
    return Growth(start, middle, end, end, error**2, 1, steps=2000.0, older=1000.0, newer=1000.0, held=4000, age=4000)


@given(st.lists(head, min_size=1, max_size=6))
def test_the_courses_of_many_heads_are_those_of_each(heads: list[list[float]]) -> None:
    with np.errstate(all="ignore"):
        growth = grown(heads)
        expected = [one_by_one(growth, index) for index in range(len(heads))]
        np.testing.assert_allclose(courses(growth, np.arange(len(heads))), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("course", "words"),
    [
        (6000.0, " in about 3,600 steps (840 at the earliest, if it continues)."),
        (0.0, " Its largest |score| is past 512."),
        (math.inf, " Its growth slows down: on this course its largest |score| stays below 512."),
        (1e9, " Its growth slows down: on this course its largest |score| stays below 512."),
        (math.nan, "the cause looks like rounding."),
    ],
)
def test_a_verdict_says_how_sure_its_forecast_is(course: float, words: str) -> None:
    evidence = {"offset": 9.0, "offset_before": 4.0, "window_steps": 100.0}
    told = verdict(Finding("offset", "rounding", "warning"), evidence, course, step=100, of=(1, 2), before=None)
    assert told.sentence.endswith(words)
    assert told.harm_in_sight == (None if math.isnan(course) else course < 1e9)


@given(older=st.floats(0.1, 10.0), newer=st.floats(0.1, 10.0), left=st.floats(0.1, 50.0))
def test_a_head_that_moves_as_far_as_each_rate_lets_it_is_foreseen_to_go_on_at_the_rate_of_today(
    older: float, newer: float, left: float
) -> None:
    end = 512.0 - left
    middle = end - newer
    values = [np.full((WIDTH, 1), each) for each in (middle - older, middle, end, end, 1e-9)]
    start, half, now, last, error = values
    growth = Growth(start, half, now, last, error**2, 1, 2000.0, 1000.0 * older, 1000.0 * newer, 4000, 4000)
    assert float(courses(growth, np.array([0]))[0]) == pytest.approx(1000.0 * left, rel=1e-3)


now = st.floats(1.0, 100.0)
"""What has grown so far."""
far = st.floats(2.0, 500.0)
"""The target, in what has grown so far."""


@given(level=st.floats(-50.0, 0.0), grown=now, doublings=st.floats(0.2, 6.0), far=far)
def test_what_compounds_from_zero_or_below_goes_on_from_there(
    level: float, grown: float, doublings: float, far: float
) -> None:
    start, middle, end = (level + grown / 2 ** (doublings * back) for back in (2, 1, 0))
    assume(end > 0.1)
    likely = until(far * end, start, middle, end)
    assert likely == pytest.approx(math.log2((far * end - level) / grown) / doublings, rel=1e-5)


@given(level=st.floats(0.1, 50.0), grown=now, doublings=st.floats(0.2, 6.0), far=far)
def test_what_compounds_above_a_level_is_never_foreseen_too_early(
    level: float, grown: float, doublings: float, far: float
) -> None:
    start, middle, end = (level + grown / 2 ** (doublings * back) for back in (2, 1, 0))
    came = math.log2((far * end - level) / grown) / doublings
    assert until(far * end, start, middle, end) >= came * (1 - 1e-6)


@given(start=st.floats(-20.0, 20.0), gained=st.floats(0.5, 50.0), keeps=st.floats(0.05, 0.95), far=far)
def test_what_levels_off_below_the_target_never_reaches_it_and_above_it_does_on_time(
    start: float, gained: float, keeps: float, far: float
) -> None:
    middle, end = start + gained, start + gained * (1 + keeps)
    ceiling = end + gained * keeps**2 / (1 - keeps)
    assume(end > 0.1)
    never = until(ceiling + far, start, middle, end)
    assert math.isinf(never)
    part = 1 / far  # of what is left to gain
    soon = until(end + part * (ceiling - end), start, middle, end)
    assert soon == pytest.approx(math.log(1 - part) / math.log(keeps), rel=1e-5)


@given(
    heights=st.tuples(st.floats(-50.0, 50.0), st.floats(-50.0, 50.0), st.floats(0.1, 50.0)),
    error=st.floats(0.0, 1.0),
    far=far,
    exponent=st.integers(-40, 40),
)
def test_the_unit_does_not_matter(heights: tuple[float, float, float], error: float, far: float, exponent: int) -> None:
    """Nor does the time scale: a forecast is a number of halves of the window."""
    assume(heights[2] > heights[1])
    unit = 2.0**exponent
    start, middle, end = heights
    told = until(far * end, start, middle, end, error)
    scaled = until(far * end * unit, start * unit, middle * unit, end * unit, error * unit)
    np.testing.assert_allclose(scaled, told, rtol=1e-9)


@given(
    start=st.floats(-20.0, 20.0),
    gained=st.floats(1.0, 50.0),
    far=far,
    noise=st.tuples(*[st.floats(-1.0, 1.0)] * 3),
)
def test_noise_within_one_standard_error_of_each_value_makes_no_compounding_of_even_growth(
    start: float, gained: float, far: float, noise: tuple[float, float, float]
) -> None:
    """Three errors of the same sign as the curvature make 2 % of the change; sqrt(2) errors a half are left out."""
    error = 0.02 * gained
    true = (start, start + gained, start + 2 * gained)
    start, middle, end = (value + 0.7 * error * each for value, each in zip(true, noise, strict=True))
    assume(end > 0.1)
    likely = until(far * end, start, middle, end, error)
    assert likely == pytest.approx((far - 1) * end / (end - middle), rel=1e-9)


def test_a_drift_is_warned_about_only_if_it_does_harm_within_some_windows_and_its_risk_says_how_near_that_is() -> None:
    """A drift of 1.5 nats in a thousand steps is worth none, as shipped; one that doubles is warned about as ever."""
    far, told = play(creep, until=9000, bias=0.6)
    unasked, told_unasked = play(creep, until=9000, bias=0.6, detectors=Detectors(HEADS, HOWEVER_FAR))
    assert (told, raised(told_unasked)) == ([], [HEADS[SICK]])
    assert 0.0 < far.risk[SICK] < 0.5
    assert unasked.risk[SICK] == 1.0
    assert (far.risk <= unasked.risk).all()
    _, unasked_doubling = play(explosion, until=5500, bias=0.6, detectors=Detectors(HEADS, HOWEVER_FAR))
    doubling, told = play(explosion, until=5500, bias=0.6)
    assert raised(told) == raised(unasked_doubling) == [HEADS[SICK]]
    assert told[0].step - unasked_doubling[0].step <= 400
    assert told[0].forecast_steps is not None
    assert told[0].forecast_steps <= 6 * told[0].evidence["window_steps"]
    assert doubling.risk[SICK] == 1.0


def test_heads_whose_scores_were_not_recorded_are_not_held_back() -> None:
    def unscored(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        return offset, np.full_like(score, math.nan)

    _, told = play(unscored, until=6000, bias=0.6, detectors=Detectors(HEADS, DetectorConfig(horizon_windows=0.2)))
    assert raised(told) == [HEADS[SICK]]
    _, quiet = play(healthy, until=6000, detectors=Detectors(HEADS, DetectorConfig(horizon_windows=0.2)))
    assert quiet == []
