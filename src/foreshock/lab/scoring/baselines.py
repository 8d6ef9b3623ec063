"""What people watch today, as signals over a recorded run, to be scored beside our detectors.

A signal is a number that rises with the danger; it warns when it passes a threshold. Loss and gradient norm are read at
every step, the others at every sample. docs/scoring.md names the sources, and what was assumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.four_conditions import blocks_met

_ALPHA: Final = 0.97
_WARMUP: Final = 25
_Z_CLIP: Final = 2.5
_FIRST_STEP: Final = 500
"""No z-score is judged while a run begins."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One monitored number of one run; NaN where nothing is known yet."""

    step: npt.NDArray[np.int64]
    value: Floats


@dataclass(frozen=True, slots=True)
class Baseline:
    """A monitor of today. `signal` gives None for a trace that did not record what it reads."""

    name: str
    threshold: float
    """as published"""
    signal: Callable[[Trace], Signal | None]


def _z_score(step: npt.NDArray[np.int64], values: Floats) -> Signal | None:
    """(value - mean) / deviation, of exponential averages of the values before it, as ZClip (arXiv 2504.02507).

    The first 25 values give the first mean and variance. A value beyond 2.5 enters the averages clipped to
    mean + 2.5^2 / z * deviation (ZClip's reciprocal clipping), so that a spike does not hide the next. Infinite for a
    value that is not finite.
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


def _loss_z(trace: Trace) -> Signal | None:
    return _z_score(trace.steps.step, trace.steps.loss)


def _grad_norm_z(trace: Trace) -> Signal | None:
    return _z_score(trace.steps.step, trace.steps.grad_norm)


def _largest_of(rows: Sequence[tuple[int, Floats | None]]) -> Signal | None:
    """The largest value of each row that knows one."""
    known = [(step, float(np.nanmax(v))) for step, v in rows if v is not None and not np.isnan(v).all()]
    if not known:
        return None
    return Signal(np.array([step for step, _ in known]), np.array([value for _, value in known]))


def _largest_score(trace: Trace) -> Signal | None:
    return _largest_of([(r.step, r.largest_score) for r in readings(trace)])


def _largest_offset(trace: Trace) -> Signal | None:
    return _largest_of([(r.step, np.abs(r.score_offset)) for r in readings(trace)])


def _four_conditions(trace: Trace) -> Signal | None:
    return _largest_of(blocks_met(trace))


BASELINES: Final = (
    Baseline("largest offset of the model", 50.0, _largest_offset),
    Baseline("four conditions", 1.0, _four_conditions),
    Baseline("largest score of the model", 100.0, _largest_score),
    Baseline("gradient-norm z-score", _Z_CLIP, _grad_norm_z),
    Baseline("loss z-score", 3.0, _loss_z),
)
