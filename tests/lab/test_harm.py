"""When a run is first harmed, on losses and gradients whose course is known."""

import math

import numpy as np
from tests.lab.made_up import STEPS, noisy, steps

from foreshock.lab.recording.harm import first_harm


def test_a_run_is_harmed_from_the_first_of_three_blocks_in_a_row_above_its_control() -> None:
    control = noisy(2.0)
    loss = control.copy()
    loss[1000:1200] += 0.1  # two blocks alone are no harm
    loss[3000:] += 0.06
    harm = first_harm(steps(loss), steps(control))
    assert harm is not None
    assert (harm.step, harm.by, harm.against) == (3001, "loss", "control")
    assert first_harm(steps(control), steps(control)) is None


def test_an_excess_that_comes_back_is_harm_only_when_it_was_large() -> None:
    control = noisy(2.0)
    for excess, harmed in ((0.08, False), (0.3, True)):
        loss = control.copy()
        loss[1000:1600] += excess
        harm = first_harm(steps(loss), steps(control))
        assert (harm is not None) == harmed


def test_a_gradient_norm_that_doubles_is_harm() -> None:
    control = noisy(2.0)
    norm = np.full(STEPS, 0.5)
    norm[4000:] = 1.2
    harm = first_harm(steps(control, norm), steps(control))
    assert harm is not None
    assert (harm.step, harm.by) == (4001, "gradient norm")


def test_what_comes_after_the_end_of_the_control_is_judged_against_its_last_blocks() -> None:
    control = noisy(2.0)
    assert first_harm(steps(control), steps(control[:4000])) is None
    ends = control.copy()
    ends[5000:] += 0.12
    harm = first_harm(steps(ends), steps(control[:4000]))
    assert harm is not None
    assert (harm.step, harm.by, harm.against) == (5001, "loss", "control")
    assert first_harm(steps(control + 0.04 * (np.arange(STEPS) >= 5000)), steps(control[:4000])) is None  # within 5 %


def test_a_loss_that_is_not_finite_is_harm_at_once() -> None:
    loss = noisy(2.0)
    loss[1234] = math.nan
    harm = first_harm(steps(loss), steps(noisy(2.0)))
    assert harm is not None
    assert (harm.step, harm.by) == (1235, "non-finite")


def test_without_a_control_a_run_is_compared_with_its_own_past() -> None:
    falling = 2.0 + 3.0 * np.exp(-np.arange(STEPS) / 500) + noisy(0.0)
    assert first_harm(steps(falling)) is None
    falling[4500:] += 0.4
    harm = first_harm(steps(falling))
    assert harm is not None
    assert (harm.step, harm.against) == (4501, "own past")


def test_a_loss_that_was_never_recorded_is_no_harm() -> None:
    unknown = np.full(STEPS, math.nan)
    assert first_harm(steps(unknown, unknown), steps(noisy(2.0))) is None
