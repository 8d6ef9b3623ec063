"""What makes a warning of one head, condition by condition: each case differs in one thing from a supported drift."""

from typing import Any

import numpy as np
import pytest

from foreshock.monitor.detect.bias_evidence import ASKED, BiasEvidence
from foreshock.monitor.detect.growth import Growth, HeadSignal
from foreshock.monitor.detect.rule import DetectorConfig, WarningConditions

FAR_OFF = DetectorConfig(horizon_windows=None)
Course = tuple[float, float, float]


def judged(
    offset: Course = (-4.0, -6.0, -8.0),
    score: Course = (20.0, 25.0, 30.0),
    *,
    capital: float = 2 * ASKED,
    held: int = 20_000,
    age: int | None = None,
    error: float = 0.01,
    config: DetectorConfig = FAR_OFF,
) -> WarningConditions:
    """The conditions of one head whose offset and largest score went so from the start to the end of 4,000 steps, and
    whose delta bias won so much on a negative offset. age: of the run; as old as what is held by default."""
    start, middle, end = (np.array([[one], [other]]) for one, other in zip(offset, score, strict=True))
    growth = Growth(start, middle, end, end, np.full((2, 1), error**2), 1, 4000.0, 2000.0, 2000.0, held, age or held)
    bias = BiasEvidence.begin(1)
    bias.capital[0], bias.bets[:] = capital, 50.0
    return WarningConditions.of(growth, bias, np.array([True]), config)


def ratio(found: WarningConditions, signal: HeadSignal) -> float:
    return float(found.ratios[signal, 0])


def test_a_drift_with_evidence_is_supported_and_warns() -> None:
    found = judged()
    assert found.supported.all()
    assert ratio(found, HeadSignal.OFFSET) >= 1.0


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("the offset comes back", {"offset": (-8.0, -6.0, -4.0)}),
        ("scores spread four times as much as they move", {"score": (20.0, 40.0, 60.0)}),
        ("a young run grows by less than it would anyway", {"held": 1000}),
        ("the offset grows by less than a nat and a half", {"offset": (-7.0, -7.5, -8.0)}),
        ("rounding follows from scores that are dangerous already", {"score": (600.0, 605.0, 610.0)}),
    ],
)
def test_a_drift_is_not_supported_if(why: str, changed: dict[str, Any]) -> None:
    assert not judged(**changed).supported.any(), why


def test_a_run_that_is_old_is_not_taken_for_a_young_one_because_little_of_it_is_held() -> None:
    assert judged(held=1000, age=20_000).supported.all()


def test_an_offset_that_comes_back_is_no_part_of_a_warning() -> None:
    assert ratio(judged((-8.0, -6.0, -4.0)), HeadSignal.OFFSET) == 0.0


@pytest.mark.parametrize(("error", "together"), [(2.0, True), (0.0, False)])
def test_what_scores_grew_by_counts_less_its_error(error: float, together: bool) -> None:
    assert judged(score=(20.0, 28.5, 37.0), error=error).supported.all() == together


@pytest.mark.parametrize(("held", "undecided"), [(400, False), (600, True)])
def test_closer_samples_are_asked_for_once_a_drift_may_be_warned_about(held: int, undecided: bool) -> None:
    found = judged((-0.5, -4.0, -8.0), (2.0, 6.0, 10.0), capital=ASKED / 8, held=held)
    assert found.undecided == undecided


def test_a_far_offset_warns_without_evidence_but_not_before_the_earliest_step() -> None:
    assert ratio(judged((40.0, 50.0, 60.0), capital=1.0), HeadSignal.OFFSET) == pytest.approx(1.2)
    assert ratio(judged((1.0, 40.0, 80.0), (2.0, 50.0, 90.0), capital=1.0, held=400), HeadSignal.OFFSET) == 0.0


@pytest.mark.parametrize(("horizon", "capital", "warns"), [(30, ASKED, True), (30, 1.0, False), (90, 1.0, True)])
def test_harm_has_to_be_three_times_as_near_without_evidence(horizon: float, capital: float, warns: bool) -> None:
    found = judged((40.0, 50.0, 60.0), capital=capital, config=DetectorConfig(horizon_windows=horizon))  # in 24 windows
    assert (ratio(found, HeadSignal.OFFSET) >= 1.0) == warns


def test_a_score_warns_by_its_growth_and_not_by_its_size_alone() -> None:
    assert ratio(judged((0.1, 0.1, 0.1), (400.0, 260.0, 120.0)), HeadSignal.SCORE) == pytest.approx(0.3)
    assert ratio(judged(score=(590.0, 595.0, 600.0)), HeadSignal.SCORE) >= 1.0
    assert ratio(judged(score=(700.0, 650.0, 600.0)), HeadSignal.SCORE) < 1.0, "it falls"
