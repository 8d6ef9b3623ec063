"""When a run is first harmed: the one definition that every lead in this laboratory is measured to.

Loss and gradient norm before clipping are averaged over blocks of 100 steps and compared, block by block, with the
float32 control of the same recipe and seed, which saw the same batches. The run is harmed from the first step of the
first three blocks in a row in which its loss is more than 2.5 % above the control's, or its gradient norm is more
than twice the control's, and in which it does not come back (the median of all later blocks is beyond the limit too)
or is four times as far out; or from the first step whose loss or gradient norm is not finite. For scale: two
trainings that differ in nothing but rounding, and that both end well, may differ by 2 % for a thousand steps, in either
direction, while the loss still falls fast. Blocks after the end of the control are not judged.

A run that has no control (a failure in float32, say) is compared with its own past instead: with the lowest loss of any
earlier block, and 5 %, since batches differ; and with the median gradient norm of its earlier blocks, and a factor of
three. The first `_SETTLE_BLOCKS` blocks give the past and are not judged.
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
"""A harm that passes counts from this multiple of the limit on."""
_AGAINST_CONTROL: Final = (0.025, 1.0)
"""By which share loss and gradient norm of a block may be above what they are compared with."""
_AGAINST_OWN_PAST: Final = (0.05, 2.0)


def first_harm(steps: Steps, control: Steps | None = None) -> int | None:
    """The step of the first harm; None for a run that was not harmed."""
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


def _before(values: Floats, of: Callable[[Floats], Any]) -> Floats:
    """For each block what `of` gives of all blocks before it; NaN for the first blocks, and where nothing is known."""
    base = np.full(len(values), np.nan)
    for place in range(_SETTLE_BLOCKS, len(values)):
        if not np.isnan(values[:place]).all():
            base[place] = of(values[:place])
    return base


def _lasting(excess: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """The blocks beyond the limit that stay beyond it by the median of the later ones, or that are far beyond."""
    stays = [bool(each > limit and np.nanmedian(excess[place:]) > limit) for place, each in enumerate(excess)]
    beyond: npt.NDArray[np.bool_] = np.array(stays, dtype=np.bool_) | (excess > _FAR_BEYOND * limit)
    return beyond
