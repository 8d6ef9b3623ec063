"""What growth means for a head: the steps until its scores are dangerous, and the verdict in words."""

import math

from foreshock.contract import wire
from foreshock.monitor.detect.growth import Growth
from foreshock.monitor.detect.signals import DANGEROUS_SCORE, SIGNALS, HeadSignal


def forecast(growth: Growth | None, index: int) -> tuple[float | None, float | None, float | None]:
    """Steps until the largest |score| of a head reaches 512: likely, earliest, latest; None where no end shows."""
    score = math.nan if growth is None else float(growth.end[HeadSignal.SCORE, index])
    if growth is None or not math.isfinite(score):
        return None, None, None
    if score >= DANGEROUS_SCORE:
        return 0.0, 0.0, 0.0
    found: list[tuple[float, float, float]] = []
    offset = abs(float(growth.end[HeadSignal.OFFSET, index]))  # which moves the score as far as it moves itself
    for signal, target in (
        (HeadSignal.OFFSET, offset + DANGEROUS_SCORE - score),
        (HeadSignal.SCORE, DANGEROUS_SCORE),
    ):
        sign = math.copysign(1.0, float(growth.end[signal, index]))
        parts = (growth.start[signal, index], growth.middle((signal, index)), growth.end[signal, index])
        start, middle, end = (sign * float(part) for part in parts)
        newer, older, half = end - middle, middle - start, growth.steps / 2
        if not newer > 0 or not float(growth.sigmas((signal, index))) >= 2.0:
            continue
        line = (target - end) / newer * half
        curve = math.log(target / end) / math.log(end / middle) * half if middle > 0 else line
        likely = curve if older > 0 and newer >= 1.2 * older else math.sqrt(line * curve)  # between, where it may turn
        found.append((likely, 0.5 * min(line, curve), 1.5 * max(line, curve)))
    return min(found, key=lambda steps: steps[0]) if found else (None, None, None)


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
