"""A rule of four conditions as a rival of the shipped detectors: offset, its delta bias, a forecast, persistence.

A reader of the recordings found it after the fact. Its thresholds are frozen, so that runs which nobody has seen can
judge both; blocks and courses are those of the shipped detectors, stretched where the learning rate falls.
"""

import math
from typing import Final

import numpy as np

from foreshock.contract.modes import ROUNDING_ENDS
from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Trace, readings
from foreshock.monitor.detect.forecast import courses
from foreshock.monitor.detect.growth import HeadPasts, HeadSignal

_FIRST_STEP: Final = 1000
_OFFSET: Final = 3.0
"""|offset| in nats from which a drift counts."""
_MOVED: Final = 1.5
"""Nats by which the offset moved away from zero over the window."""
_SUPPORT: Final = 4.0
"""Standard errors of the delta bias the way that the offset has gone."""
_LIVES: Final = 3.0
"""The forecast of a score of 512 is within so many times the run's steps so far."""
_BLOCKS: Final = 3
"""In a row."""
_SHARP: Final = 1024.0
"""A largest |score| that is warned about whatever moves it."""
_WINDOW: Final = 4000
_BLOCK: Final = 100
_EVEN: Final = 1e-9
"""Difference from 1 below which a power of the step makes an exponential."""


def blocks_met(trace: Trace) -> list[tuple[int, Floats]]:
    """The step of every sample, and the share of the blocks in a row that each head has met, [N]; 1 warns."""
    heads = len(trace.heads)
    past = HeadPasts.begin(heads, _WINDOW, _BLOCK)
    total, squares, block, met = np.zeros((4, heads))
    rates: list[tuple[int, float]] = []
    found = []
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for reading in readings(trace):
            block += np.nan_to_num(np.where(reading.modes & int(ROUNDING_ENDS), 0.0, reading.delta_bias_sum))
            rates += [(reading.step, rate)] if (rate := reading.learning_rate) else []
            if past.add(reading.step - reading.since_step, reading):
                total += block
                squares += block * block
                block[:] = 0.0
                now = np.zeros(heads, dtype=np.bool_)
                growth = past.growth(_WINDOW)
                if reading.step >= _FIRST_STEP and not math.isnan(growth.steps):
                    offset, score = growth.end[HeadSignal.OFFSET], growth.end[HeadSignal.SCORE]
                    moved = np.sign(offset) * (offset - growth.start[HeadSignal.OFFSET])
                    push = total / np.sqrt(squares) * np.sign(offset)
                    drifts = (np.abs(offset) >= _OFFSET) & (moved >= _MOVED) & (push >= _SUPPORT)
                    ahead = _while_rate_falls(courses(growth, np.arange(heads)), rates, growth.steps)
                    now = (drifts & (ahead <= _LIVES * reading.step)) | (score >= _SHARP)
                met = np.where(now, met + 1, 0.0)
            found.append((reading.step, np.minimum(met / _BLOCKS, 1.0)))
    return found


def _while_rate_falls(steps: Floats, rates: list[tuple[int, float]], window: float) -> Floats:
    """In how many steps a rate that goes on falling by the same power of the step takes heads as far as today's would
    in `steps`."""
    if not rates:
        return steps
    age, last = rates[-1]
    since, first = next(each for each in rates if each[0] >= age - window)
    power = math.log(first / last) / math.log(age / since) if last < first and since < age else 0.0
    if abs(power - 1.0) < _EVEN:
        return np.asarray(age * np.expm1(steps / age))
    left = np.maximum(1.0 + (1.0 - power) * steps / age, 0.0)  # 0: it ends before
    return np.asarray(age * (left ** (1.0 / (1.0 - power)) - 1.0))
