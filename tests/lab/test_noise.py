"""Limits of quality loss follow the noise of a recipe."""

from pathlib import Path

import numpy as np
from tests.lab.made_up import noisy, record, steps

from foreshock.lab.recording.harm import first_harm
from foreshock.lab.recording.trace import Steps, read_trace
from foreshock.lab.scoring.noise import calibrated_limits, controls_of, limits_of_recipes
from foreshock.lab.scoring.table import lab_score


def part(size: float, seed: int) -> tuple[Steps, Steps]:
    """Two runs of the same whose losses wander apart by up to `size`, as a share, for hundreds of steps."""
    walk = np.repeat(np.random.default_rng(seed).uniform(-1, 1, size=8), 750)
    both = noisy(2.0, seed=seed)
    return steps(both), steps(both * (1 + size * walk))


def test_limits_follow_the_noise_of_a_recipe_and_no_control_is_harmed_by_another() -> None:
    quiet = calibrated_limits([part(0.0, 1), part(0.0, 1)[::-1]])
    assert (quiet.loss_excess, quiet.grad_norm_factor) == (0.005, 1.2)
    found = []
    for size in (0.01, 0.04):
        pairs = [pair for seed in (1, 2, 3) for pair in (part(size, seed), part(size, seed)[::-1])]
        limits = calibrated_limits(pairs)
        assert all(first_harm(one, other, limits) is None for one, other in pairs)
        assert size < limits.loss_excess < 3 * size
        found.append(limits.loss_excess)
    assert found[1] > 2 * found[0]
    calm = noisy(2.0)
    apart = steps(calm * (1 + 0.04 * (np.arange(len(calm)) >= 3000))), steps(calm)
    assert first_harm(*apart) is not None  # the fixed limit takes this noise for harm
    assert first_harm(*apart, calibrated_limits([apart])) is None


def test_controls_made_twice_give_their_recipe_its_own_limits(tmp_path: Path) -> None:
    once = record(tmp_path / "once.jsonl.gz", fails=False, recipe="calm")
    arms = ("control", "control-again")
    pair = [record(tmp_path / f"{arm}.jsonl.gz", fails=False, recipe="other", arm=arm) for arm in arms]
    controls = controls_of(map(read_trace, [once, *pair]))
    assert set(limits_of_recipes(controls)) == {"other"}
    loss = noisy(2.0, seed=1)
    loss[4000:] *= 1.015  # within the fixed limit, beyond that of a recipe without noise
    failing = tmp_path / "failing.jsonl.gz"
    record(failing, fails=True, recipe="other")
    scores, _ = lab_score([failing, *pair])
    assert scores[0].harm_limits is not None
    assert scores[0].harm_limits.loss_excess == 0.005
    assert scores[0].harm_step == 5001
    assert first_harm(steps(loss), read_trace(pair[0]).steps, scores[0].harm_limits) is not None
    assert first_harm(steps(loss), read_trace(pair[0]).steps) is None
