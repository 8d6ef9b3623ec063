"""When a run is first harmed: the one definition that every lead in this laboratory is measured to.

Loss and gradient norm before clipping are averaged over blocks of 100 steps and compared, block by block, with the
float32 control of the same recipe and seed, which saw the same batches. The run is harmed from the first step of the
first three blocks in a row in which its loss lies more than 2.5 % above the control's, or its gradient norm is more
than twice the control's, and in which it does not come back (the median of all later blocks is beyond the limit too)
or lies four times as far out; or from the first step whose loss or gradient norm is not finite. For scale: two
trainings that differ in nothing but rounding, and that both end well, may differ by 2 % for a thousand steps, in either
direction, while the loss still falls fast; on the recipe key-bias their paired blocks differ by 0.06 %.
Where the control ended sooner, the blocks after its end are judged by themselves, against the mean of its last
`_LAST_BLOCKS`: a healthy run goes on from there. Their batches differ, so the wider limits of the next paragraph hold.

A run that has no control (a failure in float32, say) is compared with its own past instead: with the lowest loss of any
earlier block, and 5 %, since batches differ; and with the median gradient norm of its earlier blocks, and a factor of
three. The first `_SETTLE_BLOCKS` blocks give the past and are not judged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Steps

BLOCK_STEPS: Final = 100
BLOCKS_IN_A_ROW: Final = 3
_SETTLE_BLOCKS: Final = 5
_LAST_BLOCKS: Final = 10
_FAR_BEYOND: Final = 4.0
"""A harm that passes counts from this multiple of the limit on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a block may lie from what it is compared with."""

    loss_excess: float
    """as a share"""
    grad_norm_factor: float


_AGAINST_CONTROL: Final = Limits(0.025, 2.0)
_AGAINST_OWN_PAST: Final = Limits(0.05, 3.0)


@dataclass(frozen=True, slots=True)
class Harm:
    """The first harm of a run."""

    step: int
    by: Literal["loss", "gradient norm", "non-finite"]
    against: Literal["control", "own past"]


def first_harm(steps: Steps, control: Steps | None = None) -> Harm | None:
    """The first harm; None for a run that was not harmed."""
    against: Literal["control", "own past"] = "own past" if control is None else "control"
    found: list[Harm] = []
    broken = np.isinf(steps.loss) | np.isinf(steps.grad_norm) | np.isnan(steps.loss) & ~np.isnan(steps.loss).all()
    if broken.any():
        place = int(np.argmax(broken))
        found.append(Harm(int(steps.step[place] - steps.span[place] + 1), "non-finite", against))
    blocks, *values = _blocks(steps)
    judged: list[tuple[npt.NDArray[np.int64], Sequence[Floats], Sequence[Floats], Limits]] = []
    if control is None:
        judged.append((blocks, values, (_lowest_before(values[0]), _median_before(values[1])), _AGAINST_OWN_PAST))
    else:
        known, *of_control = _blocks(control)
        kept, mine, theirs = np.intersect1d(blocks, known, return_indices=True)
        judged.append((kept, [v[mine] for v in values], [v[theirs] for v in of_control], _AGAINST_CONTROL))
        after = blocks > known.max(initial=-1)
        ends = [np.full(after.sum(), _mean(v[-_LAST_BLOCKS:])) for v in of_control]
        judged.append((blocks[after], [v[after] for v in values], ends, _AGAINST_OWN_PAST))
    for blocks, (loss, grad_norm), (base_loss, base_norm), allowed in judged:
        with np.errstate(divide="ignore", invalid="ignore"):
            tests: tuple[tuple[Literal["loss", "gradient norm"], Floats, float], ...] = (
                ("loss", (loss - base_loss) / np.abs(base_loss), allowed.loss_excess),
                ("gradient norm", grad_norm / base_norm - 1.0, allowed.grad_norm_factor - 1.0),
            )
        for by, excess, limit in tests:
            beyond = excess > limit if control is None else _lasting(excess, limit)
            start = _first_in_a_row(beyond, BLOCKS_IN_A_ROW)
            if start is not None:
                found.append(Harm(int(blocks[start]) * BLOCK_STEPS + 1, by, against))
    return min(found, key=lambda harm: harm.step, default=None)


def _blocks(steps: Steps) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Numbers of the blocks that hold values, and mean loss and gradient norm of each; NaN left out."""
    number = (steps.step - 1) // BLOCK_STEPS
    blocks, place = np.unique(number, return_inverse=True)

    def mean(values: Floats) -> Floats:
        weight = np.where(np.isfinite(values), steps.span, 0).astype(np.float64)
        total = np.bincount(place, weight * np.nan_to_num(values, posinf=0.0, neginf=0.0), len(blocks))
        weights = np.bincount(place, weight, len(blocks))
        means: Floats = np.divide(total, weights, out=np.full(len(blocks), np.nan), where=weights > 0)
        return means

    return blocks, mean(steps.loss), mean(steps.grad_norm)


def _mean(values: Floats) -> float:
    """Of the values that were recorded; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _lowest_before(values: Floats) -> Floats:
    base = np.full(len(values), np.nan)
    if len(values) > _SETTLE_BLOCKS:
        base[_SETTLE_BLOCKS:] = np.fmin.accumulate(values)[_SETTLE_BLOCKS - 1 : -1]
    return base


def _median_before(values: Floats) -> Floats:
    base = np.full(len(values), np.nan)
    for place in range(_SETTLE_BLOCKS, len(values)):
        past = values[:place][~np.isnan(values[:place])]
        base[place] = np.median(past) if len(past) else np.nan
    return base


def _lasting(excess: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """The blocks beyond the limit that stay beyond it by the median of what follows, or that lie far beyond."""
    stays = np.array(
        [np.nanmedian(excess[place:]) > limit if excess[place] > limit else False for place in range(len(excess))]
    )
    beyond: npt.NDArray[np.bool_] = stays.astype(np.bool_) | (excess > _FAR_BEYOND * limit)
    return beyond


def _first_in_a_row(flags: npt.NDArray[np.bool_], count: int) -> int | None:
    """Index of the first of `count` set flags in a row."""
    run = 0
    for place, flag in enumerate(flags.tolist()):
        run = run + 1 if flag else 0
        if run == count:
            return place - count + 1
    return None
