"""A rule of four conditions as a rival of the shipped detectors: offset, its delta bias, a forecast, persistence.

A reader of the recordings found it after the fact: on the runs known by then it warned about as many failing heads as
the shipped detectors, with no more false alarms. It is frozen here so that runs which nobody has seen can judge both.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.modes import ROUNDING_ENDS
from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Trace, readings
from foreshock.monitor.detect.forecast import courses
from foreshock.monitor.detect.growth import Growth, HeadPasts, HeadSignal
from foreshock.monitor.detect.readings import Readings

FIRST_STEP: Final = 1000
OFFSET: Final = 3.0
"""|offset| in nats from which a drift counts."""
MOVED: Final = 1.5
"""Nats by which the offset moved away from zero over the window."""
SUPPORT: Final = 4.0
"""Standard errors of the delta bias the way that the offset has gone."""
LIVES: Final = 3.0
"""The forecast of a score of 512 lies within so many times the run's life so far."""
BLOCKS: Final = 3
"""In a row."""
SHARP: Final = 1024.0
"""A largest |score| that is warned about whatever moves it."""
_WINDOW: Final = 4000
_BLOCK: Final = 100


class FourConditions:
    """Follows N heads; `update` takes samples in the order of their steps."""

    def __init__(self, heads: int) -> None:
        self._past = HeadPasts.begin(heads, _WINDOW, _BLOCK)
        self._bias = np.zeros((3, heads))
        """Delta bias [3, N]: sum over closed blocks, sum of their squares, sum over the open block."""
        self._met = np.zeros(heads, dtype=np.int64)
        """Blocks in a row in which a head met the conditions."""

    def update(self, reading: Readings) -> Floats:
        """The share of the blocks in a row that each head has met, [N]; 1 warns."""
        self._bias[2] += np.nan_to_num(np.where(reading.modes & int(ROUNDING_ENDS), 0.0, reading.delta_bias_sum))
        counted, rate = (reading.rows, reading.score_offset, reading.largest_score), reading.learning_rate
        with np.errstate(divide="ignore", invalid="ignore"):  # a head that counted no row stays unknown
            closed = self._past.add(reading.step, reading.since_step, *counted, rate=rate)
        if closed:
            total, squares, block = self._bias
            total += block
            squares += block * block
            block[:] = 0.0
            growth = self._past.growth(min(reading.step / 2, _WINDOW))
            met = growth is not None and reading.step >= FIRST_STEP and self._conditions(growth, reading.step)
            self._met = np.where(met, self._met + 1, 0)
        shares: Floats = np.minimum(self._met / BLOCKS, 1.0)
        return shares

    def _conditions(self, growth: Growth, step: int) -> npt.NDArray[np.bool_]:
        """Whether each head meets all four now, [N]."""
        offset, score = growth.end[HeadSignal.OFFSET], growth.end[HeadSignal.SCORE]
        moved = growth.moved()[HeadSignal.OFFSET]
        with np.errstate(divide="ignore", invalid="ignore"):
            push = self._bias[0] / np.sqrt(self._bias[1]) * np.sign(offset)
            drifts = (np.abs(offset) >= OFFSET) & (moved >= MOVED) & (push >= SUPPORT)
            ahead = np.full(len(offset), np.inf)
            heads = np.flatnonzero(drifts)
            ahead[heads] = courses(growth, heads)
            met: npt.NDArray[np.bool_] = (drifts & (ahead <= LIVES * step)) | (score >= SHARP)
        return met


def followed(trace: Trace) -> Iterator[tuple[int, Floats]]:
    """Yield the step of every sample of a recorded run, and the rule's share of each head."""
    rule = FourConditions(len(trace.heads))
    for reading in readings(trace):
        yield reading.step, rule.update(reading)
