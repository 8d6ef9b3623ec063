"""The past of every head in blocks of steps, and how its offset and its largest score moved over a window of it."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from typing import Annotated, Final, Self

import numpy as np
import numpy.typing as npt
from pydantic import GetPydanticSchema
from pydantic_core.core_schema import no_info_after_validator_function, plain_serializer_function_ser_schema

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import is_finite

_JITTER_MEMORY: Final = 0.9
"""Weight of the past in the running square of the difference between neighbouring blocks."""
BLOCKS_PER_RUN: Final = 40
"""A young run is seen in finer blocks: one is as long as this part of the run so far, up to `block_steps`."""
_ENDED: Final = 1e-9
"""A learning rate that fell to this part, or to nothing, moves nothing any more."""
_LONGEST_PART: Final = 4
"""Blocks that start, middle and end are means of; fewer in a short window."""


_AS_ARRAY: Final = GetPydanticSchema(
    lambda _, handler: no_info_after_validator_function(
        wire.Array.numpy,
        handler(wire.Array),
        serialization=plain_serializer_function_ser_schema(lambda array: wire.Array.of(array).model_dump()),
    )
)
SavedFloats = Annotated[Floats, _AS_ARRAY]
SavedInts = Annotated[npt.NDArray[np.int32], _AS_ARRAY]
"""Arrays of a state that is saved, exact to the bit."""


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
    error: Floats
    """standard error of each of these"""
    steps: float
    """between the centres of start and end"""
    step: int
    """at which the window ends"""
    rate_fall: float = 0.0
    """the learning rate falls by this power of the step; 0 where it does not fall, or is not known"""


@dataclass(slots=True, kw_only=True)
class HeadPasts:
    """A ring of blocks of N heads. A block is closed by the first sample that makes it long enough for the run's age.

    The oldest block is written over by the newest.
    """

    block_steps: int
    values: SavedFloats
    """offset and score of each block, [blocks, 2, N]; NaN where not known"""
    steps: SavedFloats
    """at which each block was closed, [blocks]"""
    rates: SavedFloats
    """the learning rate then"""
    jitter: SavedFloats
    """square of the standard error of a block, [2, N]"""
    open_rows: SavedFloats
    """of the open block, [N]"""
    open_offsets: SavedFloats
    """rows times their offset"""
    open_score: SavedFloats
    """the largest; NaN where not known"""
    open_steps: int = 0
    closed: int = 0
    """blocks closed in all"""
    last_step: int = 0
    """at which the last block was closed; 0 before the first"""

    @classmethod
    def begin(cls, heads: int, window_steps: int, block_steps: int) -> Self:
        """Of heads that nothing is known of yet."""
        blocks = max(-(-window_steps // block_steps), BLOCKS_PER_RUN) + 1
        return cls(
            block_steps=block_steps,
            values=np.full((blocks, len(HeadSignal), heads), np.nan),
            steps=np.zeros(blocks),
            rates=np.full(blocks, np.nan),
            jitter=np.full((len(HeadSignal), heads), np.nan),
            open_rows=np.zeros(heads),
            open_offsets=np.zeros(heads),
            open_score=np.full(heads, np.nan),
        )

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
        self.open_rows += rows
        self.open_offsets += total
        np.fmax(
            self.open_score,
            score if is_finite(score) else np.where(np.isfinite(score), score, np.nan),
            out=self.open_score,
        )
        self.open_steps += step - since_step
        if self.open_steps < min(self.block_steps, step / BLOCKS_PER_RUN):
            return False
        place = self.closed % len(self.steps)
        self.steps[place], self.rates[place], self.last_step = step, math.nan if rate is None else rate, step
        block, before = self.values[place], self.values[place - 1]
        np.divide(self.open_offsets, self.open_rows, out=block[HeadSignal.OFFSET])
        block[HeadSignal.SCORE] = self.open_score
        if self.closed:
            square = (block - before) ** 2 / 2
            mixed = _JITTER_MEMORY * self.jitter + (1 - _JITTER_MEMORY) * square
            self.jitter = mixed if is_finite(mixed) else np.where(np.isnan(mixed), np.fmin(self.jitter, square), mixed)
        self.closed, self.open_steps = self.closed + 1, 0
        self.open_rows[:] = self.open_offsets[:] = 0.0
        self.open_score[:] = np.nan
        return True

    def growth(self, window_steps: float) -> Growth | None:
        """Over the last `window_steps`; None while fewer than four blocks, or less than three quarters, are held."""
        held = min(self.closed, len(self.steps))
        order = np.arange(self.closed - held, self.closed) % len(self.steps)  # oldest first; steps never fall
        order = order[bisect_right(self.steps[order], self.last_step - window_steps) :]
        count, steps = len(order), self.steps[order]
        if count < 4 or steps[-1] - steps[0] < 0.75 * window_steps:
            return None
        part = min(max(1, count // 6), _LONGEST_PART)
        half = (count - part) // 2
        places = order[:part], order[half : half + part], order[-part:]
        start, middle, end = (reduce(np.add, [self.values[place] for place in each.tolist()]) / part for each in places)
        error = np.sqrt(self.jitter / part)
        older, newer = (float(steps[each].sum()) / part for each in (slice(part), slice(-part, None)))
        before, now = (float(self.rates[each].sum()) / part for each in (places[0], places[-1]))
        falls = 0 <= now < before  # it rises, stays, or is not known
        fall = math.log(before / max(now, _ENDED * before)) / math.log(newer / older) if falls else 0.0
        return Growth(start, middle, end, error, newer - older, self.last_step, fall)
