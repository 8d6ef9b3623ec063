"""The past of every head in blocks of steps, and how its offset and its largest score moved over a window of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

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
    error: Floats
    """standard error of start, middle and end"""
    steps: float
    """between the centres of start and end; NaN if too few blocks are held for any growth"""
    older: float
    """steps from start to middle, each counted by its learning rate in parts of today's"""
    newer: float
    """from middle to end"""
    held: int
    """steps of the past that is held"""


@dataclass(slots=True, kw_only=True)
class HeadPasts:
    """A ring of blocks of N heads. A block is closed by the first sample that makes it long enough for what is held.

    The oldest block is written over by the open one. Steps are counted from where the past begins, not by their number.
    """

    block_steps: int
    values: SavedFloats
    """offset and score of each block, [blocks, 2, N]; NaN where not known. The open one has the sum of rows times their
    offset."""
    ends: SavedFloats
    """steps of the past at which each block was closed, [blocks]"""
    moved: SavedFloats
    """learning rate times steps up to then"""
    jitter: SavedFloats
    """square of the standard error of a block, [2, N]"""
    open_rows: SavedFloats
    """of the open block, [N]"""
    open_steps: int = 0
    held: int = 0
    """steps that the past is long, with the open block"""
    rate_steps: float = 0.0
    """learning rate times steps of all of it; a rate that is not known counts as the last one that was"""
    rate: float = 1.0
    closed: int = 0
    """blocks closed in all"""
    newest_steps: int = 0
    """of the newest block"""

    @classmethod
    def begin(cls, heads: int, window_steps: int, block_steps: int) -> Self:
        """Of heads that nothing is known of yet."""
        blocks = max(-(-window_steps // block_steps), BLOCKS_PER_PAST) + 2
        made = cls(
            block_steps=block_steps,
            values=np.full((blocks, len(HeadSignal), heads), np.nan),
            ends=np.zeros(blocks),
            moved=np.zeros(blocks),
            jitter=np.full((len(HeadSignal), heads), np.nan),
            open_rows=np.zeros(heads),
        )
        made._open()
        return made

    def add(self, steps: int, readings: Readings) -> bool:
        """Add a sample of so many steps: a mean weighted by rows, and a maximum. True where it closes a block. What is
        not finite leaves its signal of that head as it was."""
        rows, score, rate = readings.rows, readings.largest_score, readings.learning_rate
        total = rows * readings.score_offset
        if not readings.finite:
            known = np.isfinite(total)
            rows, total = np.where(known, rows, 0.0), np.where(known, total, 0.0)
            score = np.where(np.isfinite(score), score, np.nan)
        place = self.closed % len(self.ends)
        block, before = self.values[place], self.values[place - 1]
        self.open_rows += rows
        block[HeadSignal.OFFSET] += total
        np.fmax(block[HeadSignal.SCORE], score, out=block[HeadSignal.SCORE])
        self.rate = rate if rate is not None and rate > 0 else self.rate
        self.open_steps += steps
        self.held += steps
        self.rate_steps += self.rate * steps
        if self.open_steps < min(self.block_steps, self.held / BLOCKS_PER_PAST):
            return False
        self.newest_steps, self.ends[place], self.moved[place] = self.open_steps, self.held, self.rate_steps
        block[HeadSignal.OFFSET] /= self.open_rows
        if self.closed:
            square = block - before
            square *= square
            square /= 2
            mixed = _JITTER_MEMORY * self.jitter
            mixed += (1 - _JITTER_MEMORY) * square
            self.jitter = mixed if is_finite(mixed) else np.where(np.isnan(mixed), np.fmin(self.jitter, square), mixed)
        self.closed += 1
        self._open()
        return True

    def _open(self) -> None:
        """Begin a block."""
        self.open_steps, block = 0, self.values[self.closed % len(self.ends)]
        self.open_rows[:] = block[HeadSignal.OFFSET] = 0.0
        block[HeadSignal.SCORE] = np.nan

    def set_back(self, steps: int) -> None:
        """Forget the newest steps."""
        self.held = max(self.held - steps, 0)
        order = self._order()
        order = order[self.ends[order] <= self.held]
        self.closed = len(order)
        for part in (self.values, self.ends, self.moved):
            part[: self.closed] = part[order]
        self.rate_steps = float(self.moved[self.closed - 1]) if self.closed else 0.0
        self._open()

    def _order(self) -> npt.NDArray[np.int64]:
        """The places of the blocks that are held, the oldest first."""
        return np.arange(max(0, self.closed - len(self.ends) + 1), self.closed) % len(self.ends)

    @np.errstate(invalid="ignore")  # the mean of no value is not known
    def growth(self, window_steps: float) -> Growth:
        """Over the newer half of the past, at most `window_steps`; NaN while fewer than four blocks are held."""
        order = self._order()
        if len(order) < _LEAST_BLOCKS:
            unknown = np.full_like(self.jitter, np.nan)
            newest = self.values[order[-1]] if len(order) else unknown
            return Growth(unknown, unknown, unknown, newest, unknown, math.nan, math.nan, math.nan, self.held)
        begin = self.ends[order[-1]] - min(self.held / 2, window_steps)
        order = order[min(int(np.searchsorted(self.ends[order], begin, side="right")), len(order) - _LEAST_BLOCKS) :]
        part = min(max(1, len(order) // 6), _LONGEST_PART)
        half = (len(order) - part) // 2
        places = order[:part], order[half : half + part], order[-part:]
        start, middle, end = (_mean([self.values[place] for place in each.tolist()]) for each in places)
        times, rates = ([sum(at[each].tolist()) / part for each in places] for at in (self.ends, self.moved))
        return Growth(
            *(start, middle, end, self.values[order[-1]], np.sqrt(self.jitter / part)),
            steps=times[2] - times[0],
            older=(rates[1] - rates[0]) / self.rate,
            newer=(rates[2] - rates[1]) / self.rate,
            held=self.held,
        )


def _mean(blocks: Sequence[Floats]) -> Floats:
    """Of those blocks, [2, N] each, that know a value."""
    total = blocks[0] + blocks[1] if len(blocks) > 1 else blocks[0].copy()
    for block in blocks[2:]:
        total += block
    if is_finite(total):
        total /= len(blocks)
        return total
    known = ~np.isnan(np.stack(blocks))
    return np.asarray(np.where(known, np.stack(blocks), 0.0).sum(axis=0) / known.sum(axis=0))
