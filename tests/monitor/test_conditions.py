"""The conditions of a warning, one by one: each case differs from a supported drift in one respect."""

from typing import Any

import numpy as np
import pytest

from foreshock.monitor.detect.bias_evidence import ASKED, BiasEvidence
from foreshock.monitor.detect.growth import Growth, HeadSignal
from foreshock.monitor.detect.rule import DetectorConfig, WarningConditions

NO_HORIZON = DetectorConfig(horizon_windows=None)
Course = tuple[float, float, float]


def judged(
    offset: Course = (-4.0, -6.0, -8.0),
    score: Course = (20.0, 25.0, 30.0),
    *,
    capital: float = 2 * ASKED,
    held: int = 20_000,
    age: int | None = None,
    error: float = 0.01,
    config: DetectorConfig = NO_HORIZON,
) -> WarningConditions:
    """The conditions of one head with this offset and largest score at the start, middle and end of 4,000 steps.

    capital: evidence that the delta bias pushes the offset down. held: steps of history. age: of the run; default held.
    """
    start, middle, end = (np.array([[one], [other]]) for one, other in zip(offset, score, strict=True))
    growth = Growth(start, middle, end, end, np.full((2, 1), error**2), 1, 4000.0, 2000.0, 2000.0, held, age or held)
    bias = BiasEvidence.begin(1)
    bias.capital[0], bias.bets[:] = capital, 50.0
    return WarningConditions.of(growth, bias, np.array([True]), config)


def ratio(found: WarningConditions, signal: HeadSignal) -> float:
    return float(found.ratios[signal, 0])


def test_drift_with_evidence_is_supported_and_warns() -> None:
    found = judged()
    assert found.supported.all()
    assert ratio(found, HeadSignal.OFFSET) >= 1.0


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("the offset returns towards zero", {"offset": (-8.0, -6.0, -4.0)}),
        ("scores spread four times as much as they move", {"score": (20.0, 40.0, 60.0)}),
        ("a young run grows no faster than healthy ones", {"held": 1000}),
        ("the offset grows by less than a nat and a half", {"offset": (-7.0, -7.5, -8.0)}),
        ("scores were dangerous before the drift", {"score": (600.0, 605.0, 610.0)}),
    ],
)
def test_drift_that_misses_one_condition_is_not_supported(case: str, changed: dict[str, Any]) -> None:
    assert not judged(**changed).supported.any(), case


def test_old_run_with_a_short_history_is_not_judged_as_young() -> None:
    assert judged(held=1000, age=20_000).supported.all()


def test_returning_offset_adds_nothing_to_the_warning_ratio() -> None:
    assert ratio(judged((-8.0, -6.0, -4.0)), HeadSignal.OFFSET) == 0.0


@pytest.mark.parametrize(("error", "supported"), [(2.0, True), (0.0, False)])
def test_score_growth_is_reduced_by_its_error(error: float, supported: bool) -> None:
    assert judged(score=(20.0, 28.5, 37.0), error=error).supported.all() == supported


@pytest.mark.parametrize(("held", "undecided"), [(400, False), (600, True)])
def test_drift_is_undecided_only_after_the_earliest_step(held: int, undecided: bool) -> None:
    found = judged((-0.5, -4.0, -8.0), (2.0, 6.0, 10.0), capital=ASKED / 8, held=held)
    assert found.undecided == undecided


def test_large_offset_warns_without_evidence_but_not_before_the_earliest_step() -> None:
    assert ratio(judged((40.0, 50.0, 60.0), capital=1.0), HeadSignal.OFFSET) == pytest.approx(1.2)
    assert ratio(judged((1.0, 40.0, 80.0), (2.0, 50.0, 90.0), capital=1.0, held=400), HeadSignal.OFFSET) == 0.0


@pytest.mark.parametrize(("horizon", "capital", "warns"), [(30, ASKED, True), (30, 1.0, False), (90, 1.0, True)])
def test_forecast_horizon_is_a_third_without_evidence(horizon: float, capital: float, warns: bool) -> None:
    found = judged((40.0, 50.0, 60.0), capital=capital, config=DetectorConfig(horizon_windows=horizon))  # in 24 windows
    assert (ratio(found, HeadSignal.OFFSET) >= 1.0) == warns


def test_score_warns_only_while_it_grows() -> None:
    assert ratio(judged((0.1, 0.1, 0.1), (400.0, 260.0, 120.0)), HeadSignal.SCORE) == pytest.approx(0.3)
    assert ratio(judged(score=(590.0, 595.0, 600.0)), HeadSignal.SCORE) >= 1.0
    assert ratio(judged(score=(700.0, 650.0, 600.0)), HeadSignal.SCORE) < 1.0, "the score falls"
