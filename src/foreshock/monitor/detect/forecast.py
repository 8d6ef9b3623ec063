"""The steps until the scores of a head are dangerous, if it goes on as it does."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import Growth

DANGEROUS_SCORE: Final = 512.0
"""Where rounding q and k to bf16 moves a score by about 1; forecasts count the steps until then."""
_STEEPEST: Final = 1e6
"""Factor from half to half beyond which the older half was level."""
_EVEN: Final = 1e-9
"""Difference from 1 below which that factor makes a line."""


@np.errstate(all="ignore")
def courses(growth: Growth, heads: npt.NDArray[np.int64], dangerous: float = DANGEROUS_SCORE) -> Floats:
    """Steps at today's learning rate until a `dangerous` score where some heads go on as they do, [len(heads)]: inf
    where they level off before, NaN where no score was recorded. The sooner course of offset and score counts.

    Weights move in proportion to the learning rate, so each step of the past counts by its own.
    """
    start, middle, reached = (part.take(heads, axis=1) for part in (growth.start, growth.middle, growth.end))
    error = growth.error((slice(None), heads))
    offset, score = np.abs(reached[0]), reached[1]  # an offset moves the score as far as it moves itself
    target = np.array([offset + dangerous - score, np.full(len(heads), dangerous)])
    sign = np.copysign(1.0, reached)
    start, middle, end = (sign * part for part in (start, middle, reached))
    half = (growth.older + growth.newer) / 2
    even = end - (end - middle) * (half / growth.newer)  # where the middle would lie at an even rate
    steps = half * halves_until(target, even - (middle - start) * (half / growth.older), even, end, error)
    goes_on = (end > middle) & ((end - start) / (math.sqrt(2.0) * error) >= 2.0) & (steps < math.inf)
    found: Floats = np.where(goes_on, steps, math.inf).min(axis=0)
    found[score >= dangerous] = 0.0
    found[~np.isfinite(score)] = math.nan
    return found


@np.errstate(all="ignore")
def halves_until(target: Floats, start: Floats, middle: Floats, end: Floats, error: Floats) -> Floats:
    """Until what grew from `start` over `middle` to `end` reaches `target`, in halves of that time; inf for never.

    What was gained in the newer half over what was gained in the older is the factor by which growth goes on: 1 is a
    line, less levels off, more compounds. As much of that as the `error` of each value may have made is left out. A
    second course compounds from zero. The later of the two is given: what grows evenly is not doubled, and a jump is no
    explosion.
    """
    newer, older = end - middle, middle - start
    apart = math.sqrt(2.0) * error
    least = np.where(older + apart > 0, (newer - apart) / (older + apart), math.inf)
    most = np.where(older > apart, (newer + apart) / (older - apart), math.inf)
    factor = np.minimum(np.maximum(np.minimum(np.maximum(1.0, least), most), 0.0), _STEEPEST)
    even = (target - end) / newer
    halves = np.where(np.abs(factor - 1.0) < _EVEN, even, np.log1p(even * (factor - 1) / factor) / np.log(factor))
    going_on = np.where(np.isnan(halves), math.inf, halves)  # it levels off before
    from_zero = np.where(middle > 0, np.log(target / end) / np.log(end / middle), going_on)
    found: Floats = np.maximum(going_on, from_zero)
    return found
