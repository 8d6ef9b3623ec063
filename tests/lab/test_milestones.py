"""What a run that still trains is known to have passed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.lab.training.milestones import Milestones

QUIET = np.full(100, 0.3)


def course(losses: list[float], norms: list[float] | None = None, scores: list[float] | None = None) -> Milestones:
    milestones = Milestones()
    for number, loss in enumerate(losses):
        norm = QUIET if norms is None else np.full(100, norms[number])
        score = 40.0 if scores is None else scores[number]
        milestones.block(100 * (number + 1), np.full(100, loss), norm, score, judge=True)
    return milestones


@given(st.lists(st.floats(0.001, 0.05), min_size=4, max_size=30))
def test_a_loss_that_only_falls_passes_nothing(falls: list[float]) -> None:
    assert course((4.0 - np.cumsum(falls)).tolist()).passed == {}


@given(st.integers(1, 12), st.floats(1.026, 1.09))
def test_a_loss_above_its_lowest_for_three_blocks_is_harm_at_the_third(place: int, factor: float) -> None:
    assert course([2.0] * place + [2.0 * factor] * 2 + [2.0] * 3).passed == {}
    assert course([2.0] * place + [2.0 * factor] * 5).passed == {"harm": 100 * (place + 3)}


def test_a_gradient_twice_its_median_is_harm_and_one_block_of_it_is_none() -> None:
    assert course([2.0] * 8, [0.3] * 5 + [0.61] * 3).passed == {"harm": 800}
    assert course([2.0] * 8, [0.3] * 5 + [90.0, 0.3, 90.0]).passed == {}


@pytest.mark.parametrize("worse", [2.21, float("nan"), float("inf")])
def test_a_loss_a_tenth_above_its_lowest_or_no_number_is_an_explosion(worse: float) -> None:
    assert course([3.0, 2.0, 2.0, worse]).passed == {"explosion": 400}


def test_a_score_of_ten_thousand_is_an_explosion_while_the_loss_is_still_quiet() -> None:
    assert course([2.0] * 3, scores=[40.0, 9999.0, 1e4]).passed == {"explosion": 300}


def test_what_came_before_the_warning_is_past_and_not_judged() -> None:
    milestones = Milestones()
    for step in (100, 200, 300, 400):
        milestones.block(step, np.full(100, 9.0 if step > 100 else 2.0), QUIET, 1e6, judge=False)
    assert milestones.passed == {}
