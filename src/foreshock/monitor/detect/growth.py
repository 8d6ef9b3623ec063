"""Store the past of every head in blocks of steps, and measure how its offset and largest score grew over a window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainSerializer, PlainValidator

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import Readings, is_finite

_JITTER_MEMORY: Final = 0.9
"""Weight of the past in the moving average of the squared difference between neighbouring blocks."""
BLOCKS_PER_PAST: Final = 40
"""A short past is divided into about this many blocks; a block has at most `block_steps` steps."""
_LEAST_BLOCKS: Final = 4
"""Fewest blocks of a window; if samples are far apart, the window is longer than requested."""
_LONGEST_PART: Final = 4
"""Most blocks whose mean is the start, middle or end of a window; short windows use fewer."""

_T = TypeVar("_T")
_Saved = Annotated[
    _T,
    PlainValidator(lambda saved: wire.Array.model_validate(saved).numpy()),
    PlainSerializer(lambda array: wire.Array.of(array).model_dump()),
]
"""An array in a saved state, which is restored bit by bit."""
SavedFloats = _Saved[Floats]
SavedInts = _Saved[npt.NDArray[np.int32]]


class HeadSignal(IntEnum):
    """Row of arrays [2, N]; its name in lower case is the signal of a verdict."""

    OFFSET = 0
    SCORE = 1


SIGNAL_NAMES: Final = tuple(signal.name.lower() for signal in HeadSignal)


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of offset and largest score of every head over a window, [2, N] each; NaN if not recorded."""

    start: Floats
    middle: Floats
    end: Floats
    last: Floats
    """values of the newest block"""
    jitter: Floats
    """squared standard error of a block"""
    part: int
    """number of blocks whose mean is start, middle or end"""
    steps: float
    """steps between the centres of start and end; NaN if there are too few blocks to measure growth"""
    older: float
    """steps from start to middle, each weighted by its learning rate divided by the current one"""
    newer: float
    """steps from middle to end, with the same weights"""
    held: int
    """steps of the stored past"""
    age: int
    """steps of the run, including those before the stored past"""

    def error(self, at: Any = ...) -> Floats:
        """Return the standard error of start, middle and end, or of a part of these arrays."""
        return np.asarray(np.sqrt(self.jitter[at] / self.part))


@dataclass(slots=True)
class Block:
    """Consecutive steps with common values."""

    values: SavedFloats
    """mean offset and largest score, [2, N]; NaN if unknown"""
    end: int
    """steps of the past up to the end of this block"""
    moved: float
    """sum of the learning rates of the steps up to this end"""
    means: Annotated[dict[int, SavedFloats], Field(exclude=True)] = field(default_factory=dict)
    """cached means of the last blocks up to this one, by number of blocks"""


@dataclass(slots=True, kw_only=True)
class HeadPasts:
    """The newest blocks of N heads. A sample closes the open block when the block is long enough for the stored past.

    Steps are counted from the beginning of the past, not by their step number.
    """

    block_steps: int
    most: int
    """maximum number of stored blocks"""
    open: SavedFloats
    """values of the open block, [2, N]: the sum of offsets over rows, and the largest score"""
    open_rows: SavedFloats
    """rows in the open block, [N]"""
    jitter: SavedFloats
    """squared standard error of a block, [2, N]"""
    blocks: list[Block] = field(default_factory=list)
    """the closed blocks, oldest first"""
    open_steps: int = 0
    held: int = 0
    """steps of the past, including the open block"""
    rate_steps: float = 0.0
    """sum of the learning rates of these steps; if a rate is unknown, the last known one is used"""
    rate: float = 1.0

    @classmethod
    def begin(cls, heads: int, window_steps: int, block_steps: int) -> Self:
        """Return an empty past."""
        return cls(
            block_steps=block_steps,
            most=max(-(-window_steps // block_steps), BLOCKS_PER_PAST) + 1,
            open=_opened(heads),
            open_rows=np.zeros(heads),
            jitter=np.full((len(HeadSignal), heads), np.nan),
        )

    def add(self, steps: int, readings: Readings) -> int:
        """Add a sample of `steps` steps to the open block: offsets to a mean weighted by rows, scores to a maximum.
        Return the steps of the block if the sample closes it, else 0. Nonfinite values of a head are ignored."""
        rows, score, rate = readings.rows, readings.largest_score, readings.learning_rate
        total = rows * readings.score_offset
        if readings.largest is None:
            known = np.isfinite(total)
            rows, total = np.where(known, rows, 0.0), np.where(known, total, 0.0)
            score = np.where(np.isfinite(score), score, np.nan)
        offsets, scores = self.open
        self.open_rows += rows
        offsets += total
        np.fmax(scores, score, out=scores)
        self.rate = rate if rate is not None and rate > 0 else self.rate
        self.open_steps += steps
        self.held += steps
        self.rate_steps += self.rate * steps
        if (long := self.open_steps) < min(self.block_steps, self.held / BLOCKS_PER_PAST):
            return 0
        offsets /= self.open_rows
        self._close()
        return long

    def _close(self) -> None:
        """Append the open block to the closed ones, and begin a new one."""
        if self.blocks:
            mixed = self.open - self.blocks[-1].values
            mixed *= mixed
            mixed *= (1 - _JITTER_MEMORY) / 2
            mixed += _JITTER_MEMORY * self.jitter
            if not is_finite(mixed):
                square = (self.open - self.blocks[-1].values) ** 2 / 2
                mixed = np.where(np.isnan(mixed), np.fmin(self.jitter, square), mixed)
            self.jitter = mixed
        self.blocks.append(Block(self.open, self.held, self.rate_steps))
        del self.blocks[: -self.most]
        self._open()

    def _open(self) -> None:
        self.open_steps, self.open = 0, _opened(len(self.open_rows))
        self.open_rows[:] = 0.0

    def set_back(self, steps: int) -> None:
        """Drop the newest `steps` steps."""
        self.held = max(self.held - steps, 0)
        self.blocks = [block for block in self.blocks if block.end <= self.held]
        self.rate_steps = self.blocks[-1].moved if self.blocks else 0.0
        self._open()

    @np.errstate(invalid="ignore")  # the mean of an empty set is NaN
    def growth(self, window_steps: float, last_step: int = 0) -> Growth:
        """Return the growth over the newer half of the run, as far as it is stored, and at most `window_steps`; NaN if
        fewer than four blocks are stored.

        last_step: the number of the newest step. It shows the age of a run whose first steps were not watched.
        """
        blocks, age = self.blocks, max(self.held, last_step)
        if len(blocks) < _LEAST_BLOCKS:
            unknown = np.full_like(self.jitter, np.nan)
            newest = blocks[-1].values if blocks else unknown
            return Growth(unknown, unknown, unknown, newest, unknown, 1, math.nan, math.nan, math.nan, self.held, age)
        begin = blocks[-1].end - min(self.held, age / 2, window_steps)
        blocks = [block for block in blocks[:-_LEAST_BLOCKS] if block.end > begin] + blocks[-_LEAST_BLOCKS:]
        part = min(max(1, len(blocks) // 6), _LONGEST_PART)
        half = (len(blocks) - part) // 2
        parts = blocks[:part], blocks[half : half + part], blocks[-part:]
        start, middle, end = map(_mean, parts)
        times = [sum(block.end for block in each) / part for each in parts]
        rates = [sum(block.moved for block in each) / part for each in parts]
        return Growth(
            *(start, middle, end, self.blocks[-1].values, self.jitter, part),
            steps=times[2] - times[0],
            older=(rates[1] - rates[0]) / self.rate,
            newer=(rates[2] - rates[1]) / self.rate,
            held=self.held,
            age=age,
        )


def _opened(heads: int) -> Floats:
    """Return the values of an empty block."""
    values = np.empty((len(HeadSignal), heads))
    values[HeadSignal.OFFSET], values[HeadSignal.SCORE] = 0.0, np.nan
    return values


def _mean(blocks: Sequence[Block]) -> Floats:
    """Return the mean of the known values of blocks, [2, N]. The last block caches it, because the same blocks are the
    end of a window now and the start of one later."""
    means = blocks[-1].means
    if len(blocks) not in means:
        values = [block.values for block in blocks]
        means[len(blocks)] = total = values[0].copy()
        for each in values[1:]:
            total += each
        total /= len(blocks)
        if not is_finite(total):
            means[len(blocks)] = np.nansum(values, axis=0) / (~np.isnan(values)).sum(axis=0)
    return means[len(blocks)]
