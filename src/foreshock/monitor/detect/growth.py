"""The past of every head in blocks of steps, and how its offset and its largest score moved over a window of it."""

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
"""Weight of the past in the running square of the difference between neighbouring blocks."""
BLOCKS_PER_PAST: Final = 40
"""A short past is seen in finer blocks: one is as long as this part of it, up to `block_steps`."""
_LEAST_BLOCKS: Final = 4
"""Of a window; with samples that are far apart it is longer than asked."""
_LONGEST_PART: Final = 4
"""Blocks that start, middle and end are means of; fewer in a short window."""

_T = TypeVar("_T")
_Saved = Annotated[
    _T,
    PlainValidator(lambda saved: wire.Array.model_validate(saved).numpy()),
    PlainSerializer(lambda array: wire.Array.of(array).model_dump()),
]
"""An array of a state that is saved, exact to the bit."""
SavedFloats = _Saved[Floats]
SavedInts = _Saved[npt.NDArray[np.int32]]


class HeadSignal(IntEnum):
    """Row of arrays [2, N]; its name in small letters is the signal of a verdict."""

    OFFSET = 0
    SCORE = 1


SIGNAL_NAMES: Final = tuple(signal.name.lower() for signal in HeadSignal)


@dataclass(frozen=True, slots=True)
class Growth:
    """How offset and largest score of every head moved over a window, [2, N] each; NaN where nothing was recorded."""

    start: Floats
    middle: Floats
    end: Floats
    last: Floats
    """of the newest block alone"""
    jitter: Floats
    """square of the standard error of a block"""
    part: int
    """blocks that start, middle and end are means of"""
    steps: float
    """between the centres of start and end; NaN if too few blocks are held for any growth"""
    older: float
    """steps from start to middle, each counted by its learning rate in parts of today's"""
    newer: float
    """from middle to end"""
    held: int
    """steps of the past that is held"""
    age: int
    """steps of the run; those before the past that is held count too"""

    def error(self, at: Any = ...) -> Floats:
        """Standard error of start, middle and end, or of a part of their arrays."""
        return np.asarray(np.sqrt(self.jitter[at] / self.part))


@dataclass(slots=True)
class Block:
    """Steps that were joined."""

    values: SavedFloats
    """mean offset and largest score, [2, N]; NaN where not known"""
    end: int
    """steps of the past up to its end"""
    moved: float
    """learning rate times steps up to there"""
    means: Annotated[dict[int, SavedFloats], Field(exclude=True)] = field(default_factory=dict)
    """of so many blocks up to this one, where they have been asked for"""


@dataclass(slots=True, kw_only=True)
class HeadPasts:
    """The newest blocks of N heads. A block is closed by the first sample that makes it long enough for what is held.

    Steps are counted from where the past begins, not by their number.
    """

    block_steps: int
    most: int
    """blocks that are held"""
    open: SavedFloats
    """of the open block, [2, N]: the sum of rows times their offset, and the largest score"""
    open_rows: SavedFloats
    """of the open block, [N]"""
    jitter: SavedFloats
    """square of the standard error of a block, [2, N]"""
    blocks: list[Block] = field(default_factory=list)
    """the oldest first"""
    open_steps: int = 0
    held: int = 0
    """steps that the past is long, with the open block"""
    rate_steps: float = 0.0
    """learning rate times steps of all of it; a rate that is not known counts as the last one that was"""
    rate: float = 1.0

    @classmethod
    def begin(cls, heads: int, window_steps: int, block_steps: int) -> Self:
        """Of heads that nothing is known of yet."""
        return cls(
            block_steps=block_steps,
            most=max(-(-window_steps // block_steps), BLOCKS_PER_PAST) + 1,
            open=_opened(heads),
            open_rows=np.zeros(heads),
            jitter=np.full((len(HeadSignal), heads), np.nan),
        )

    def add(self, steps: int, readings: Readings) -> int:
        """Add a sample of so many steps: a mean weighted by rows, and a maximum. The steps of the block that it closes,
        0 if it closes none. What is not finite leaves its signal of that head as it was."""
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
        """Put the open block to the others, and begin one."""
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
        """Forget the newest steps."""
        self.held = max(self.held - steps, 0)
        self.blocks = [block for block in self.blocks if block.end <= self.held]
        self.rate_steps = self.blocks[-1].moved if self.blocks else 0.0
        self._open()

    @np.errstate(invalid="ignore")  # the mean of no value is not known
    def growth(self, window_steps: float, last_step: int = 0) -> Growth:
        """Over the newer half of the run as far as it is held, at most `window_steps`; NaN while fewer than four blocks
        are held.

        last_step: the number of the newest step, which shows how old a run is that is watched from its middle on.
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
    """Of a block that has seen nothing."""
    values = np.empty((len(HeadSignal), heads))
    values[HeadSignal.OFFSET], values[HeadSignal.SCORE] = 0.0, np.nan
    return values


def _mean(blocks: Sequence[Block]) -> Floats:
    """Of the values that they know, [2, N]. The newest block keeps it: it ends the window now, and later begins one."""
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
