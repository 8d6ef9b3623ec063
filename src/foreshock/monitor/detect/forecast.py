"""Forecast the steps until the scores of a head are dangerous, if they continue to grow as they do now."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import Growth

DANGEROUS_SCORE: Final = 512.0
"""Score at which rounding q and k to bf16 changes a score by about 1; forecasts count the steps until it is reached."""
_STEEPEST: Final = 1e6
"""Largest factor between the growth of both halves; beyond it, the older half did not grow."""
_EVEN: Final = 1e-9
"""Difference of that factor from 1 below which growth counts as linear."""


@np.errstate(all="ignore")
def courses(growth: Growth, heads: npt.NDArray[np.int64]) -> Floats:
    """Return the steps, at the current learning rate, until these heads reach DANGEROUS_SCORE if they continue as they
    do now, [len(heads)]: inf if they level off first, NaN if the score is unknown. The shorter of the courses of
    offset and score counts.

    Weights move in proportion to the learning rate, so past steps are weighted by their learning rates.
    """
    start, middle, reached = (part.take(heads, axis=1) for part in (growth.start, growth.middle, growth.end))
    error = growth.error((slice(None), heads))
    offset, score = np.abs(reached[0]), reached[1]  # the score moves by the same amount as the offset
    target = np.array([offset + DANGEROUS_SCORE - score, np.full(len(heads), DANGEROUS_SCORE)])
    sign = np.copysign(1.0, reached)
    start, middle, end = (sign * part for part in (start, middle, reached))
    half = (growth.older + growth.newer) / 2
    even = end - (end - middle) * (half / growth.newer)  # the middle at a constant learning rate
    steps = half * halves_until(target, even - (middle - start) * (half / growth.older), even, end, error)
    goes_on = (end > middle) & ((end - start) / (math.sqrt(2.0) * error) >= 2.0) & (steps < math.inf)
    found: Floats = np.where(goes_on, steps, math.inf).min(axis=0)
    found[score >= DANGEROUS_SCORE] = 0.0
    found[~np.isfinite(score)] = math.nan
    return found


@np.errstate(all="ignore")
def halves_until(target: Floats, start: Floats, middle: Floats, end: Floats, error: Floats) -> Floats:
    """Return the time until values that grew from `start` over `middle` to `end` reach `target`, in halves of the time
    from start to end; inf for never.

    The factor by which growth continues is the gain of the newer half divided by that of the older half: 1 is linear, a
    smaller factor levels off, a larger one compounds. It is moved towards 1 by as much as the `error` of each value may
    explain. A second course compounds from zero. The later of the two courses counts, so that linear growth is not
    taken for doubling, or a jump for an explosion.
    """
    newer, older = end - middle, middle - start
    apart = math.sqrt(2.0) * error
    least = np.where(older + apart > 0, (newer - apart) / (older + apart), math.inf)
    most = np.where(older > apart, (newer + apart) / (older - apart), math.inf)
    factor = np.minimum(np.maximum(np.minimum(np.maximum(1.0, least), most), 0.0), _STEEPEST)
    even = (target - end) / newer
    halves = np.where(np.abs(factor - 1.0) < _EVEN, even, np.log1p(even * (factor - 1) / factor) / np.log(factor))
    going_on = np.where(np.isnan(halves), math.inf, halves)  # NaN: it levels off before the target
    from_zero = np.where(middle > 0, np.log(target / end) / np.log(end / middle), going_on)
    found: Floats = np.maximum(going_on, from_zero)
    return found
