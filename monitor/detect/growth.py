"""The past of every head in blocks of steps, and how its offset and its largest score moved over a window of it."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import is_finite

_JITTER_MEMORY: Final = 0.9
"""Weight of the past in the running square of the difference between neighbouring blocks."""
BLOCKS_OF_A_LIFE: Final = 40
"""A young run is seen in finer blocks: one is as long as this part of the run's life, up to `block_steps`."""
_ENDED: Final = 1e-9
"""A learning rate that fell to this part, or to nothing, moves nothing any more."""
_LONGEST_PART: Final = 4
"""Blocks that start, middle and end are means of; fewer in a short window."""


class HeadSignal(IntEnum):
    """Row of arrays [2, N]; its name in small letters is what a verdict tells."""

    OFFSET = 0
    SCORE = 1


SIGNAL_NAMES: Final = tuple(signal.name.lower() for signal in HeadSignal)


@dataclass(frozen=True, slots=True)
class Growth:
    """How offset and largest score of every head moved over a window, [2, N] each; NaN where nothing was recorded."""

    start: Floats
    middle: Floats
    end: Floats
    error: Floats
    """standard error of each of these"""
    steps: float
    """between the centres of start and end"""
    step: int
    """at which the window ends"""
    rate_fall: float = 0.0
    """the learning rate falls by this power of the step; 0 where it does not fall, or is not known"""

    def moved(self) -> Floats:
        """Away from zero since the start, [2, N]."""
        moved = self.end - self.start
        away: Floats = np.copysign(moved, moved * self.end)
        return away

    def evidence(self, heads: Sequence[int]) -> dict[str, Floats]:
        """What verdicts show of these heads, by name, [len(heads)]."""
        (offset, score), (offset_before, score_before) = self.end[:, heads], self.start[:, heads]
        found = {"offset": offset, "offset_before": offset_before, "score": score, "score_before": score_before}
        steps = np.full(len(heads), self.steps)
        return {**found, "score_error": self.error[HeadSignal.SCORE, heads], "window_steps": steps}


class HeadPasts:
    """A ring of blocks. A block is closed by the first sample that makes it long enough for the run's age."""

    def __init__(self, heads: int, window_steps: int, block_steps: int) -> None:
        blocks = max(-(-window_steps // block_steps), BLOCKS_OF_A_LIFE) + 1
        self._block_steps = block_steps
        self._values = np.full((blocks, len(HeadSignal), heads), np.nan)
        self._steps = np.zeros(blocks, dtype=np.int64)
        self._rates = np.full(blocks, np.nan)
        self._jitter = np.full((len(HeadSignal), heads), np.nan)
        """square of the standard error of a block"""
        self._open = np.zeros((3, heads))
        """of the open block: rows, rows times their offset, largest score"""
        self._open[2] = np.nan
        self._anew = np.zeros((len(HeadSignal), heads))
        """1 where the past is of another measure: it becomes level at the first block of the new one"""
        self._counts = np.zeros(2, dtype=np.int64)
        """blocks closed in all; steps of the open one"""

    def restart(self, heads: npt.NDArray[np.bool_]) -> None:
        """From the next sample on the scores of `heads` [N] are others: their past is no measure of them."""
        self._anew[:, heads] = 1.0
        self._open[:, heads] = [[0.0], [0.0], [np.nan]]

    def add(
        self, step: int, since_step: int, rows: Floats, offset: Floats, score: Floats, rate: float | None = None
    ) -> bool:
        """Add one sample, arrays [N]: a mean weighted by rows, and a maximum. True where it closes a block.

        What is not finite leaves its signal of that head as it was. rate: the learning rate.
        """
        total = rows * offset
        if not is_finite(total):
            known = np.isfinite(total)
            rows, total = np.where(known, rows, 0.0), np.where(known, total, 0.0)
        self._open[0] += rows
        self._open[1] += total
        np.fmax(self._open[2], score if is_finite(score) else _known(score), out=self._open[2])
        self._counts[1] += step - since_step
        if self._counts[1] < min(self._block_steps, step / BLOCKS_OF_A_LIFE):
            return False
        place = self.closed % len(self._steps)
        self._steps[place], self._rates[place] = step, math.nan if rate is None else rate
        self._close(self._values[place], self._values[place - 1])
        return True

    def _close(self, block: Floats, before: Floats) -> None:
        rows, total, block[HeadSignal.SCORE] = self._open
        np.divide(total, rows, out=block[HeadSignal.OFFSET])
        if self._anew.any():
            known = (self._anew > 0) & np.isfinite(block)
            self._values[:, known] = block[known]
            self._anew[known] = 0.0
        if self.closed:
            square = (block - before) ** 2 / 2
            mixed = _JITTER_MEMORY * self._jitter + (1 - _JITTER_MEMORY) * square
            self._jitter = (
                mixed if is_finite(mixed) else np.where(np.isnan(mixed), np.fmin(self._jitter, square), mixed)
            )
        self._counts += 1, -self._counts[1]
        self._open[:2], self._open[2] = 0.0, np.nan

    @property
    def closed(self) -> int:
        """Blocks closed in all."""
        return int(self._counts[0])

    @property
    def last_step(self) -> int:
        """Step at which the last block was closed; 0 before the first."""
        return int(self._steps[(self.closed - 1) % len(self._steps)]) if self.closed else 0

    def growth(self, window_steps: float) -> Growth | None:
        """Over the last `window_steps`; None while fewer than four blocks, or less than three quarters, are held."""
        held = min(self.closed, len(self._steps))
        order = (self.closed - held + np.arange(held)) % len(self._steps)  # oldest first; steps never fall
        steps = self._steps[order]
        order = order[bisect_right(steps, self.last_step - window_steps) :]
        count, steps = len(order), self._steps[order]
        if count < 4 or steps[-1] - steps[0] < 0.75 * window_steps:
            return None
        part = min(max(1, count // 6), _LONGEST_PART)
        half = (count - part) // 2
        places = order[:part], order[half : half + part], order[-part:]
        start, middle, end = (reduce(np.add, [self._values[place] for place in each]) / part for each in places)
        error = np.sqrt(self._jitter / part)
        older, newer = float(steps[:part].mean()), float(steps[-part:].mean())
        before, now = (float(self._rates[each].mean()) for each in (order[:part], order[-part:]))
        falls = 0 <= now < before  # it rises, stays, or is not known
        fall = math.log(before / max(now, _ENDED * before)) / math.log(newer / older) if falls else 0.0
        return Growth(start, middle, end, error, newer - older, self.last_step, fall)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, exact to the bit."""
        return saved(self, self._ARRAYS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another window."""
        load(self, self._ARRAYS, state)

    _ARRAYS = ("_values", "_steps", "_rates", "_jitter", "_open", "_anew", "_counts")


def _known(values: Floats) -> Floats:
    """NaN in place of what is infinite."""
    return np.where(np.isfinite(values), values, np.nan)


def saved(of: object, names: Sequence[str]) -> dict[str, Any]:
    """The arrays that an object holds under these names, JSON-able, exact to the bit."""
    return {name: wire.Array.of(getattr(of, name)).model_dump() for name in names}


def load(into: object, names: Sequence[str], state: dict[str, Any]) -> None:
    """Give an object the arrays that `saved` saved. Raises ValueError for those of another shape, and lacking ones."""
    for name in names:
        own, found = getattr(into, name), wire.Array.model_validate(state.get(name, {})).numpy()
        if found.shape != own.shape:
            raise ValueError(
                f"the saved {name.strip('_')} of the detectors have shape {found.shape}, this run needs {own.shape}; "
                "resume with the same heads and the same detector configuration"
            )
        setattr(into, name, found)
