"""What growth means for a head: the steps until its scores are dangerous, and the verdict in words."""

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import Growth
from foreshock.monitor.detect.signals import DANGEROUS_SCORE, SIGNALS, HeadSignal

_STEEPEST: Final = 1e6
"""Factor from half to half beyond which the older half was level."""
_EVEN: Final = 1e-9
"""Difference from 1 below which that factor makes a line, and a power of the step an exponential."""
CAME: Final = (0.14, 0.6, 1.5)
"""The first, the middle and the last of the heads that came to 512, in parts of the steps that their course took: of
the tuning runs, rounded outwards (`foreshock lab forecasts`; lab/NOTEBOOK.md has the table)."""
NEAR_LIVES: Final = 0.5
"""A course that ends within this part of the run's life so far is near."""
_NEVER: Final = 1e9
"""Steps that no run has: a course may take any number while a learning rate falls."""
FORESEEN: Final = slice(HeadSignal.OFFSET, HeadSignal.SCORE + 1)
"""Signals whose course a forecast goes on with."""


class Forecast(NamedTuple):
    """Steps until the largest |score| of a head reaches 512; None where nobody can say."""

    likely: float | None = None
    earliest: float | None = None
    latest: float | None = None
    in_sight: bool | None = None
    """False: on its course the head levels off before"""


def forecast(course: float, *, near_steps: float) -> Forecast:
    """What is told of a head whose course takes so many steps: inf if it levels off before, NaN if nobody can say.
    A billion and more is never.

    near_steps: a longer course has no latest step, since some of the heads that are warned about so early settle.
    """
    if not math.isfinite(course) or course >= _NEVER:
        return Forecast(in_sight=None if math.isnan(course) else False)
    earliest, likely, latest = (part * course for part in CAME)
    return Forecast(likely, earliest, latest if course <= near_steps else None, True)


def courses(growth: Growth, heads: npt.NDArray[np.int64], dangerous: Floats | float = DANGEROUS_SCORE) -> Floats:
    """Steps until a `dangerous` score, one for all or [len(heads)], where some heads go on as they do, [len(heads)]:
    inf where they level off before, NaN where no score was recorded. Each step takes them as far as its learning rate,
    which goes on falling as it does."""
    of = FORESEEN, heads
    reached, error = growth.end[FORESEEN][:, heads], growth.jitter(of)
    offset, score = np.abs(reached[0]), reached[1]  # an offset moves the score as far as it moves itself
    target = np.empty_like(reached)
    target[0], target[1] = offset + dangerous - score, dangerous
    with np.errstate(all="ignore"):
        sign = np.copysign(1.0, reached)
        start, middle, end = (sign * part for part in (growth.start(of), growth.middle(of), reached))
        told = halves_until(target, *_at_todays_rate(start, middle, end, growth), error) * _half(growth)
        told = _while_rate_falls(told, growth)
        goes_on = (end > middle) & ((end - start) / (math.sqrt(2.0) * error) >= 2.0) & (told < math.inf)
    found: Floats = np.where(goes_on, told, math.inf).min(axis=0)  # the sooner of the two
    found[score >= dangerous] = 0.0
    found[~np.isfinite(score)] = math.nan
    return found


def _at_todays_rate(start: Floats, middle: Floats, end: Floats, growth: Growth) -> tuple[Floats, Floats, Floats]:
    """Where start, middle and end would lie, evenly apart, had the learning rate been today's all the time.

    Weights move in proportion to the rate, so that steps at a higher one count for more.
    """
    if growth.rate_fall == 0.0:
        return start, middle, end
    older, newer = _halves(growth)
    even = (newer + older) / 2
    moved = end - (end - middle) * (even / newer)
    return moved - (middle - start) * (even / older), moved, end


def _half(growth: Growth) -> float:
    """The steps between these: of both halves of the window the mean."""
    return growth.steps / 2 if growth.rate_fall == 0.0 else sum(_halves(growth)) / 2


def _halves(growth: Growth) -> tuple[float, float]:
    """Sums of the learning rates of the older and the newer half of the window, today's being 1."""
    newer, both = (-_sum_of_rates(-part * growth.steps, growth) for part in (0.5, 1.0))
    return both - newer, newer


def _sum_of_rates(steps: float, growth: Growth) -> float:
    """Of the next steps (negative: of the last), today's rate being 1, while it falls by the same power of the step."""
    power, share = growth.rate_fall, steps / growth.step
    if abs(power - 1.0) < _EVEN:
        return growth.step * math.log1p(share)
    summed: float = growth.step * ((1.0 + share) ** (1.0 - power) - 1.0) / (1.0 - power)
    return summed


def _while_rate_falls(steps: Floats, growth: Growth) -> Floats:
    """In how many steps a learning rate that goes on falling takes heads as far as today's would in `steps`.

    It is expected to fall by the same power of the step as over the window: an inverse square root goes on for ever,
    what falls steeply ends, and a cosine or a line is given more than it gives.
    """
    power, age = growth.rate_fall, growth.step
    if power == 0.0:
        return steps
    if abs(power - 1.0) < _EVEN:
        return age * np.expm1(steps / age)
    left = np.maximum(1.0 + (1.0 - power) * steps / age, 0.0)  # 0: it ends before
    stretched: Floats = age * (left ** (1.0 / (1.0 - power)) - 1.0)
    return stretched


def halves_until(target: Floats, start: Floats, middle: Floats, end: Floats, error: Floats) -> Floats:
    """Until what grew from `start` over `middle` to `end` reaches `target`, in halves of that time; inf for never.

    What was gained in the newer half over what was gained in the older is the factor by which growth goes on: 1 is a
    line, less levels off, more compounds. As much of that as the `error` of each value may have made is left out. A
    second course compounds from zero. The later of the two is told: what grows evenly is not doubled, and a jump is no
    explosion.
    """
    newer, older = end - middle, middle - start
    apart = math.sqrt(2.0) * error
    with np.errstate(all="ignore"):
        least = np.where(older + apart > 0, (newer - apart) / (older + apart), math.inf)
        most = np.where(older > apart, (newer + apart) / (older - apart), math.inf)
        going_on = _compounded(target - end, newer, np.minimum(np.maximum(1.0, least), most))
        from_zero = np.where(middle > 0, np.log(target / end) / np.log(end / middle), going_on)
        found: Floats = np.maximum(going_on, from_zero)
    return found


def _compounded(left: Floats, newer: Floats, factor: Floats) -> Floats:
    """Halves until `left` is gained, where the last one gained `newer` and each gains `factor` times the one before."""
    factor = np.minimum(np.maximum(factor, 0.0), _STEEPEST)
    even = left / newer
    log = np.log(factor)
    halves = np.where(np.abs(factor - 1.0) < _EVEN, even, np.log1p(even * (factor - 1.0) / factor) / log)
    found: Floats = np.where(np.isnan(halves), math.inf, halves)  # it levels off before
    return found


def who(verdict: wire.Verdict) -> str:
    """Of whom a verdict speaks, at the start of a sentence."""
    return "The run" if verdict.layer is None else f"Layer {verdict.layer} head {verdict.head}"


def sentence(verdict: wire.Verdict) -> str:
    """The verdict in words, with its evidence in numbers."""
    subject, seen = who(verdict), verdict.evidence
    if verdict.signal == "nonfinite":
        what = "its loss or gradient norm is" if verdict.layer is None else "its attention rows are"
        since = f"step {seen['suspect_step']:,.0f}" if "suspect_step" in seen else "this step"
        return f"{subject}: {what} not finite. Every weight is at risk; go back to a checkpoint before {since}."
    steps = f"in {seen['window_steps']:.0f} steps" if "window_steps" in seen else ""
    info = SIGNALS[HeadSignal[verdict.signal.upper()]]
    key = info.shown
    before = f" {_digits(seen[key + '_before'], 3)} to" if key + "_before" in seen else ""
    ahead = ""
    if verdict.forecast_steps == 0:
        ahead = f" Its largest |score| is past {DANGEROUS_SCORE:.0f}."
    elif verdict.forecast_steps is not None:
        steps_ahead = (verdict.forecast_steps, verdict.forecast_low_steps, verdict.forecast_high_steps)
        likely, earliest, latest = (None if each is None else _digits(each, 2) for each in steps_ahead)
        within = f"{earliest} to {latest}" if latest else f"{earliest} at the earliest, if it goes on"
        ahead = f" At this pace its largest |score| reaches {DANGEROUS_SCORE:.0f} in about {likely} steps ({within})."
    elif verdict.harm_in_sight is False:
        ahead = " No harm is in sight: on this course it levels off before."
    falls = bool(before) and abs(seen.get(key, math.nan)) < abs(seen[key + "_before"])
    moved = (
        f"{'no longer ' if falls else ''}{info.says}{before} {_digits(seen.get(key, math.nan), 3)}{info.unit} {steps}"
    )
    return f"{subject} {moved}; the cause looks like {verdict.cause}.{ahead}"


def _digits(value: float, significant: int) -> str:
    """A number as people say it: so many significant digits, no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"
