"""Definition of the first harm of a run, the step to which the laboratory measures leads.

Loss and gradient norm before clipping are averaged over blocks of 100 steps. Each block is compared with the same block
of the float32 control, which has the same recipe, seed and batches. A block is beyond the limit if its loss is more
than 2.5 % above the control's, or its gradient norm more than twice the control's. It counts if the median of this and
all later blocks is beyond the limit too, or if its own excess is more than four times the limit. The first harm is the
first step of the first three consecutive blocks that count, or the first step with a non-finite loss or gradient norm.
For scale: while the loss still falls fast, two healthy trainings that differ only in rounding may differ by 2 % for a
thousand steps, in either direction. Blocks after the end of the control are ignored.

A run without a control (such as a failure in float32) is compared with its own past. The limits are 5 % above the
lowest loss of any earlier block, because batches differ, and three times the median gradient norm of earlier blocks;
every block beyond a limit counts. The first `_SETTLE_BLOCKS` blocks are only used as the past of later ones.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Steps

BLOCK_STEPS: Final = 100
BLOCKS_IN_A_ROW: Final = 3
_SETTLE_BLOCKS: Final = 5
_FAR_BEYOND: Final = 4.0
"""Multiple of the limit from which a temporary excess counts."""
_AGAINST_CONTROL: Final = (0.025, 1.0)
"""Limits of the relative excess of a block's loss and gradient norm over the control's."""
_AGAINST_OWN_PAST: Final = (0.05, 2.0)
"""The same limits relative to the run's own past."""


def first_harm(steps: Steps, control: Steps | None = None) -> int | None:
    """Return the step of the first harm; None for a run without harm."""
    found: list[int] = []
    broken = np.isinf(steps.loss) | np.isinf(steps.grad_norm) | np.isnan(steps.loss) & ~np.isnan(steps.loss).all()
    if broken.any():
        place = int(np.argmax(broken))
        found.append(int(steps.step[place] - steps.span[place] + 1))
    blocks, *values = _blocks(steps)
    if control is None:
        bases = [_before(values[0], np.nanmin), _before(values[1], np.nanmedian)]
    else:
        known, *of_control = _blocks(control)
        blocks, mine, theirs = np.intersect1d(blocks, known, return_indices=True)
        values, bases = [value[mine] for value in values], [base[theirs] for base in of_control]
    for value, base, limit in zip(values, bases, _AGAINST_CONTROL if control else _AGAINST_OWN_PAST, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = (value - base) / np.abs(base)
        beyond = _lasting(excess, limit) if control else excess > limit
        counted = np.convolve(beyond, np.ones(BLOCKS_IN_A_ROW), "valid") if len(beyond) else np.zeros(0)
        found += (blocks[np.flatnonzero(counted == BLOCKS_IN_A_ROW)[:1]] * BLOCK_STEPS + 1).tolist()
    return min(found, default=None)


def _blocks(steps: Steps) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Return the numbers of the blocks with steps, and the mean of their finite losses and gradient norms."""
    number = (steps.step - 1) // BLOCK_STEPS
    blocks, place = np.unique(number, return_inverse=True)

    def mean(values: Floats) -> Floats:
        weight = np.where(np.isfinite(values), steps.span, 0).astype(np.float64)
        total = np.bincount(place, weight * np.nan_to_num(values, posinf=0.0, neginf=0.0), len(blocks))
        weights = np.bincount(place, weight, len(blocks))
        means: Floats = np.divide(total, weights, out=np.full(len(blocks), np.nan), where=weights > 0)
        return means

    return blocks, mean(steps.loss), mean(steps.grad_norm)


def _before(values: Floats, of: Callable[[Floats], Any]) -> Floats:
    """Apply `of` to all blocks before each block; NaN for the first blocks, and if no earlier value is known."""
    base = np.full(len(values), np.nan)
    for place in range(_SETTLE_BLOCKS, len(values)):
        if not np.isnan(values[:place]).all():
            base[place] = of(values[:place])
    return base


def _lasting(excess: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Return which blocks are beyond the limit and stay so by the median from then on, or are far beyond it."""
    stays = [bool(each > limit and np.nanmedian(excess[place:]) > limit) for place, each in enumerate(excess)]
    beyond: npt.NDArray[np.bool_] = np.array(stays, dtype=np.bool_) | (excess > _FAR_BEYOND * limit)
    return beyond
