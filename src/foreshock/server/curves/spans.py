"""A metric of many heads over spans of steps: smallest, largest and last value. Spans merge into wider ones."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats


@dataclass
class Spans:
    """Values over spans of `width` steps from `first` on, [spans, columns] each; NaN where nothing counted."""

    first: int
    width: int
    steps: npt.NDArray[np.int64]
    """[spans]: the last step seen in each; -1 in an empty one."""
    low: Floats
    high: Floats
    last: Floats
    bad: npt.NDArray[np.bool_]
    """[spans]: a run-level value was sent and was NaN."""

    @classmethod
    def over(cls, first: int, last: int, width: int, columns: int) -> Self:
        """Empty spans from step `first` to step `last`."""
        size = (last - first) // width + 1
        low, high, final = (np.full((size, columns), np.nan) for _ in range(3))
        return cls(first, width, np.full(size, -1), low, high, final, np.zeros(size, dtype=np.bool_))

    @classmethod
    def for_points(cls, first: int, last: int, points: int, columns: int) -> Self:
        """At most `points` empty spans from step `first` to step `last`."""
        return cls.over(first, last, max(1, math.ceil((last - first + 1) / points)), columns)

    def add(
        self,
        steps: npt.NDArray[np.int64],
        low: Floats,
        high: Floats,
        last: Floats,
        bad: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Take in values at ascending steps, [steps, columns] each; spans may be filled in any order."""
        spans = (steps - self.first) // self.width
        edges = np.flatnonzero(np.r_[True, spans[1:] != spans[:-1]]) if len(spans) else np.empty(0, dtype=np.intp)
        if not len(edges):
            return
        at = spans[edges]
        self.low[at] = np.fmin(self.low[at], np.fmin.reduceat(low, edges, axis=0))
        self.high[at] = np.fmax(self.high[at], np.fmax.reduceat(high, edges, axis=0))
        if bad is not None:
            self.bad[at] |= np.logical_or.reduceat(bad, edges)
        newer = (steps >= self.steps[spans])[:, None] & ~np.isnan(last)
        newest = np.maximum.reduceat(np.where(newer, np.arange(len(steps))[:, None], -1), edges, axis=0)
        found = np.take_along_axis(last, np.maximum(newest, 0), axis=0)
        self.last[at] = np.where(newest >= 0, found, self.last[at])  # later steps overwrite where they have a value
        self.steps[at] = np.maximum(self.steps[at], np.maximum.reduceat(steps, edges))
