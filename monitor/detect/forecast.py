"""What growth means for a head: the steps until its scores are dangerous, and the verdict in words."""

import math

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import Growth
from foreshock.monitor.detect.signals import DANGEROUS_SCORE, SIGNALS, HeadSignal


def forecast(growth: Growth | None, index: int) -> tuple[float | None, float | None, float | None]:
    """Steps until the largest |score| of a head reaches 512: likely, earliest, latest; None where no end shows."""
    if growth is None:
        return None, None, None
    likely, low, high = forecasts(growth, np.array([index]))[:, 0].tolist()
    return (likely, low, high) if math.isfinite(likely) else (None, None, None)


def forecasts(growth: Growth, heads: npt.NDArray[np.int64]) -> Floats:
    """The same of some heads, [3, len(heads)]: inf where no end shows, NaN where no score was recorded."""
    score = growth.end[HeadSignal.SCORE, heads]
    offset = np.abs(growth.end[HeadSignal.OFFSET, heads])  # which moves the score as far as it moves itself
    found = np.full((3, len(heads)), math.inf)
    half = growth.steps / 2
    with np.errstate(all="ignore"):
        for signal, target in (
            (HeadSignal.OFFSET, offset + DANGEROUS_SCORE - score),
            (HeadSignal.SCORE, np.full(len(heads), DANGEROUS_SCORE)),
        ):
            of = (signal, heads)
            sign = np.copysign(1.0, growth.end[of])
            start, middle, end = (sign * part for part in (growth.start[of], growth.middle(of), growth.end[of]))
            newer, older = end - middle, middle - start
            line = (target - end) / newer * half
            curve = np.where(middle > 0, np.log(target / end) / np.log(end / middle) * half, line)
            speeds_up = (older > 0) & (newer >= 1.2 * older)
            likely = np.where(speeds_up, curve, np.sqrt(line * curve))  # between the two, where it may turn
            sooner = (newer > 0) & (growth.sigmas(of) >= 2.0) & (likely < found[0])
            told = np.stack([likely, 0.5 * np.minimum(line, curve), 1.5 * np.maximum(line, curve)])
            found[:, sooner] = told[:, sooner]
    found[:, score >= DANGEROUS_SCORE] = 0.0
    found[:, ~np.isfinite(score)] = math.nan
    return found


def who(verdict: wire.Verdict) -> str:
    """Of whom a verdict speaks, at the start of a sentence."""
    return "The run" if verdict.layer is None else f"Layer {verdict.layer} head {verdict.head}"


def sentence(verdict: wire.Verdict) -> str:
    """The verdict in words, with its evidence in numbers."""
    subject, seen = who(verdict), verdict.evidence
    if verdict.signal == "nonfinite":
        what = "its loss or gradient norm is" if verdict.layer is None else "its attention rows are"
        return f"{subject}: {what} not finite. Every weight is at risk; go back to a checkpoint before this step."
    steps = f"in {seen['window_steps']:.0f} steps" if "window_steps" in seen else ""
    info = SIGNALS[HeadSignal[verdict.signal.upper()]]
    key = info.shown
    before = f" {_digits(seen[key + '_before'], 3)} to" if key + "_before" in seen else ""
    ahead = ""
    if verdict.forecast_steps == 0:
        ahead = f" Its largest |score| is past {DANGEROUS_SCORE:.0f}."
    elif verdict.forecast_steps is not None:
        left = _digits(verdict.forecast_steps, 2)
        ahead = f" At this pace its largest |score| reaches {DANGEROUS_SCORE:.0f} in about {left} steps."
    moved = f"{info.says}{before} {_digits(seen.get(key, math.nan), 3)}{info.unit} {steps}"
    return f"{subject} {moved}; the cause looks like {verdict.cause}.{ahead}"


def _digits(value: float, significant: int) -> str:
    """A number as people say it: so many significant digits, no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"
