"""When a run is first harmed, on losses and gradients whose course is known."""

import math

import numpy as np
import pytest
from tests.lab.made_up import STEPS, noisy, steps

from foreshock.lab.recording.harm import first_harm


@pytest.mark.parametrize(
    ("begins", "ends", "excess", "harm"),
    [(3000, STEPS, 0.06, 3001), (1000, 1200, 0.1, None), (1000, 1600, 0.08, None), (1000, 1600, 0.3, 1001)],
    ids=["stays", "two blocks", "comes back", "comes back from far"],
)
def test_a_run_is_harmed_from_the_first_of_three_blocks_above_its_control_that_stay_or_are_far_above(
    begins: int, ends: int, excess: float, harm: int | None
) -> None:
    control = noisy(2.0)
    loss = control.copy()
    loss[begins:ends] += excess
    assert first_harm(steps(loss), steps(control)) == harm


def test_a_gradient_norm_that_doubles_is_harm_and_what_comes_after_the_control_s_end_is_not_judged() -> None:
    control, norm = noisy(2.0), np.full(STEPS, 0.5)
    norm[4000:] = 1.2
    assert first_harm(steps(control, norm), steps(control)) == 4001
    assert first_harm(steps(control, norm), steps(control[:4000])) is None


def test_a_loss_that_is_not_finite_is_harm_at_once_and_one_that_was_never_recorded_is_not() -> None:
    loss, unknown = noisy(2.0), np.full(STEPS, math.nan)
    loss[1234] = math.nan
    assert first_harm(steps(loss), steps(noisy(2.0))) == 1235
    assert first_harm(steps(unknown, unknown), steps(noisy(2.0))) is None


def test_without_a_control_a_run_is_compared_with_its_own_past() -> None:
    falling = 2.0 + 3.0 * np.exp(-np.arange(STEPS) / 500) + noisy(0.0)
    assert first_harm(steps(falling)) is None
    falling[4500:] += 0.4
    assert first_harm(steps(falling)) == 4501
