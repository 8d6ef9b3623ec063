"""Baselines: monitors in common use, computed as signals over a recorded run and compared with foreshock's detectors.

A signal is a number that rises with the danger; it warns when it reaches a threshold. Signals of loss and gradient norm
have a value for every step, the others for every sample. docs/scoring.md gives the sources and the assumptions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.modes import ROUNDING_ENDS
from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Trace, readings
from foreshock.monitor.detect.forecast import courses
from foreshock.monitor.detect.growth import HeadPasts, HeadSignal

_ALPHA: Final = 0.97
_WARMUP: Final = 25
_Z_CLIP: Final = 2.5
_FIRST_STEP: Final = 500
"""The first step with a z-score: earlier steps are too noisy."""
_FIRST_CONDITIONS: Final = 1000
_OFFSET: Final = 3.0
"""Smallest |offset| in nats that counts as a drift."""
_MOVED: Final = 1.5
"""Smallest change of |offset| over the window, in nats."""
_SUPPORT: Final = 4.0
"""Smallest delta bias in the direction of the offset, in standard errors."""
_LIVES: Final = 3.0
"""Longest forecast until a score of 512, as a multiple of the steps so far."""
_BLOCKS: Final = 3
"""Consecutive blocks in which the conditions must be met."""
_SHARP: Final = 1024.0
"""Largest |score| that warns without the other conditions."""
_WINDOW: Final = 4000
_BLOCK: Final = 100
_EVEN: Final = 1e-9
"""Distance of the exponent from 1 below which the integral of the learning rate is taken as a logarithm."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One monitored number of one run; NaN where it is not known yet."""

    step: npt.NDArray[np.int64]
    value: Floats


@dataclass(frozen=True, slots=True)
class Baseline:
    """A monitor in common use. `signal` returns None if the trace lacks the values that the monitor reads."""

    name: str
    threshold: float
    """as published"""
    signal: Callable[[Trace], Signal | None]


def _z_score(step: npt.NDArray[np.int64], values: Floats) -> Signal | None:
    """Return (value - mean) / deviation with exponential averages of earlier values, as in ZClip (arXiv 2504.02507).

    The first 25 values give the initial mean and variance. A value with z above 2.5 enters the averages clipped to
    mean + 2.5^2 / z * deviation (ZClip's reciprocal clipping), so that a spike does not hide the next one. The z-score
    of a non-finite value is infinite. Returns None if the run has too few values.
    """
    if np.isnan(values).all() or len(values) <= _WARMUP:
        return None
    scores = np.full(len(values), np.nan)
    first = values[:_WARMUP][np.isfinite(values[:_WARMUP])]
    mean, variance = (float(first.mean()), float(first.var())) if len(first) else (0.0, 0.0)
    for place, value in enumerate(values[_WARMUP:].tolist(), start=_WARMUP):
        if not np.isfinite(value):
            scores[place] = np.inf
            continue
        deviation = max(variance**0.5, 1e-6)
        z = scores[place] = (value - mean) / deviation
        kept = mean + _Z_CLIP**2 / z * deviation if z > _Z_CLIP else value
        variance = _ALPHA * variance + (1 - _ALPHA) * (kept - mean) ** 2
        mean = _ALPHA * mean + (1 - _ALPHA) * kept
    scores[step < _FIRST_STEP] = np.nan
    return Signal(step, scores)


def _largest_of(rows: Sequence[tuple[int, Floats | None]]) -> Signal | None:
    """Return the largest value of each row, without the rows that have only NaN."""
    known = [(step, float(np.nanmax(v))) for step, v in rows if v is not None and not np.isnan(v).all()]
    if not known:
        return None
    return Signal(np.array([step for step, _ in known]), np.array([value for _, value in known]))


def blocks_met(trace: Trace) -> list[tuple[int, Floats]]:
    """Return the step of every sample, and each head's fraction of the required consecutive blocks, [N]; 1 warns.

    The rule has four conditions: offset, delta bias, forecast and persistence. A reader found it by inspecting the
    recordings. Its thresholds are frozen, so that new runs can compare it with foreshock's detectors. It uses their
    blocks and forecasts, and lengthens a forecast while the learning rate falls.
    """
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
                if reading.step >= _FIRST_CONDITIONS and not math.isnan(growth.steps):
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
    """Convert forecasts of `steps` at a constant learning rate to a rate that keeps falling as a power of the step.

    The power is fitted to the last `window` steps. Infinite if the sum of all later rates is too small.
    """
    if not rates:
        return steps
    age, last = rates[-1]
    since, first = next(each for each in rates if each[0] >= age - window)
    power = math.log(first / last) / math.log(age / since) if last < first and since < age else 0.0
    if abs(power - 1.0) < _EVEN:
        return np.asarray(age * np.expm1(steps / age))
    left = np.maximum(1.0 + (1.0 - power) * steps / age, 0.0)  # 0: never reached
    return np.asarray(age * (left ** (1.0 / (1.0 - power)) - 1.0))


BASELINES: Final = (
    Baseline(
        "largest offset of the model",
        50.0,
        lambda trace: _largest_of([(each.step, np.abs(each.score_offset)) for each in readings(trace)]),
    ),
    Baseline("four conditions", 1.0, lambda trace: _largest_of(blocks_met(trace))),
    Baseline(
        "largest score of the model",
        100.0,
        lambda trace: _largest_of([(each.step, each.largest_score) for each in readings(trace)]),
    ),
    Baseline("gradient-norm z-score", _Z_CLIP, lambda trace: _z_score(trace.steps.step, trace.steps.grad_norm)),
    Baseline("loss z-score", 3.0, lambda trace: _z_score(trace.steps.step, trace.steps.loss)),
)
