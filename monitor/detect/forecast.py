"""The steps until the scores of a head are dangerous, if it goes on as it does."""

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import Growth

DANGEROUS_SCORE: Final = 512.0
"""Where rounding q and k to bf16 moves a score by about 1; forecasts count the steps until then."""
_STEEPEST: Final = 1e6
"""Factor from half to half beyond which the older half was level."""
_EVEN: Final = 1e-9
"""Difference from 1 below which that factor makes a line, and a power of the step an exponential."""
CAME: Final = (0.14, 0.6, 1.5)
"""The first, the middle and the last of the heads that came to 512, in parts of the steps that their course took: of
the tuning runs, rounded outwards (lab/NOTEBOOK.md has the table)."""
NEAR_RUN_MULTIPLE: Final = 0.5
"""A course that ends within this part of the run so far is near."""
_NEVER: Final = 1e9
"""Steps that no run has: a course may take any number while a learning rate falls."""


class Forecast(NamedTuple):
    """Fields of a verdict: the steps until the largest |score| of a head reaches 512; None where that is unknown."""

    forecast_steps: float | None = None
    forecast_low_steps: float | None = None
    forecast_high_steps: float | None = None
    harm_in_sight: bool | None = None


def forecast(course: float, *, near_steps: float) -> Forecast:
    """The forecast for a head whose course takes `course` steps: inf if it levels off before, NaN if that is unknown.

    near_steps: a longer course has no latest step, since some of the heads that are warned about so early settle.
    """
    if not math.isfinite(course) or course >= _NEVER:
        return Forecast(harm_in_sight=None if math.isnan(course) else False)
    earliest, likely, latest = (part * course for part in CAME)
    return Forecast(likely, earliest, latest if course <= near_steps else None, True)


@np.errstate(all="ignore")
def courses(growth: Growth, heads: npt.NDArray[np.int64], dangerous: Floats | float = DANGEROUS_SCORE) -> Floats:
    """Steps until a `dangerous` score, one for all or [len(heads)], where some heads go on as they do, [len(heads)]:
    inf where they level off before, NaN where no score was recorded.

    The sooner course of offset and score counts. Weights move in proportion to the learning rate, so each step takes a
    head as far as its rate, which goes on falling by the same power of the step as over the window.
    """
    start, middle, reached, error = (
        part.take(heads, axis=1) for part in (growth.start, growth.middle, growth.end, growth.error)
    )
    offset, score = np.abs(reached[0]), reached[1]  # an offset moves the score as far as it moves itself
    target = np.empty_like(reached)
    target[0], target[1] = offset + dangerous - score, dangerous
    newer, both = (-_sum_of_rates(-part * growth.steps, growth) for part in (0.5, 1.0))
    older, half = both - newer, both / 2
    sign = np.copysign(1.0, reached)
    start, middle, end = (sign * part for part in (start, middle, reached))
    even = end - (end - middle) * (half / newer)  # where the middle would lie at today's rate all the time
    halves = halves_until(target, even - (middle - start) * (half / older), even, end, error)
    steps = _while_rate_falls(halves * half, growth)
    goes_on = (end > middle) & ((end - start) / (math.sqrt(2.0) * error) >= 2.0) & (steps < math.inf)
    found: Floats = np.where(goes_on, steps, math.inf).min(axis=0)
    found[score >= dangerous] = 0.0
    found[~np.isfinite(score)] = math.nan
    return found


def _sum_of_rates(steps: float, growth: Growth) -> float:
    """Of the next steps (negative: of the last), today's rate being 1, while it falls by the same power of the step."""
    power, share = growth.rate_fall, steps / growth.step
    if abs(power - 1.0) < _EVEN:
        return growth.step * math.log1p(share)
    return float(growth.step * ((1.0 + share) ** (1.0 - power) - 1.0) / (1.0 - power))


def _while_rate_falls(steps: Floats, growth: Growth) -> Floats:
    """In how many steps a falling rate takes heads as far as today's would in `steps`: an inverse square root goes on
    for ever, what falls steeply ends, and a cosine or a line is given more than it gives."""
    power, age = growth.rate_fall, growth.step
    if abs(power - 1.0) < _EVEN:
        return age * np.expm1(steps / age)
    left = np.maximum(1.0 + (1.0 - power) * steps / age, 0.0)  # 0: it ends before
    stretched: Floats = age * (left ** (1.0 / (1.0 - power)) - 1.0)
    return stretched


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
    factor = np.clip(np.minimum(np.maximum(1.0, least), most), 0.0, _STEEPEST)
    even = (target - end) / newer
    halves = np.where(np.abs(factor - 1.0) < _EVEN, even, np.log1p(even * (factor - 1) / factor) / np.log(factor))
    going_on = np.where(np.isnan(halves), math.inf, halves)  # it levels off before
    from_zero = np.where(middle > 0, np.log(target / end) / np.log(end / middle), going_on)
    found: Floats = np.maximum(going_on, from_zero)
    return found
