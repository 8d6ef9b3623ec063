"""Verdicts from their evidence: why a head is warned about, and in which words."""

import math
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.causes import Cause
from foreshock.contract.decision import cause_of, checkpoint_before
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.non_finite import NON_FINITE

CAME: Final = (0.14, 0.6)
"""The first and the middle of the heads that came to 512, in parts of the steps that their course took: of the tuning
runs, rounded outwards (lab/NOTEBOOK.md has the table). No latest step can be given: some heads settle."""
_NEVER: Final = 1e9
"""Steps that no run has."""


class Evidence(NamedTuple):
    """What a verdict shows of a head; NaN where it is not known."""

    offset: float = math.nan
    offset_before: float = math.nan
    score: float = math.nan
    score_before: float = math.nan
    window_steps: float = math.nan
    bias_evidence: float = math.nan
    """what bets on the delta bias won, in parts of what supports a drift"""
    suspect_step: float = math.nan
    critical_step: float = math.nan
    """the step at which the verdict became critical"""


class Finding(NamedTuple):
    """The evidence of a head now, and what follows from it."""

    signal: str
    evidence: Evidence
    cause: Cause
    severity: wire.Severity
    course: float
    """steps until 512: inf where it levels off before, NaN where that is unknown"""


def verdict(
    found: Finding, *, step: int, layer: int | None, head: int | None, before: wire.Verdict | None
) -> wire.Verdict:
    """A verdict of what is found. before: the verdict that is active; a cause that differs from its cause is given as
    its correction."""
    ends = math.isfinite(found.course) and found.course < _NEVER
    evidence = found.evidence
    if found.severity == "critical":  # a checkpoint from before this step holds no harm yet
        known = before.evidence.get("critical_step", math.inf) if before else math.inf
        evidence = evidence._replace(critical_step=min(float(step), known))
    low, likely = (part * found.course if ends else None for part in CAME)
    made = wire.Verdict(
        id=before.id if before else f"{'run' if layer is None else f'l{layer}h{head}'}-{step}",
        step=step,
        state="updated" if before else "raised",
        severity=found.severity,
        layer=layer,
        head=head,
        cause=found.cause,
        signal=found.signal,
        evidence={name: value for name, value in evidence._asdict().items() if math.isfinite(value)},
        corrected_from=before.corrected_from if before else None,
        corrected_step=before.corrected_step if before else None,
        forecast_steps=likely,
        forecast_low_steps=low,
        harm_in_sight=None if math.isnan(found.course) else ends,
        sentence=_sentence(who(layer, head), found, low, likely),
    )
    if before is None or cause_of(before) == cause_of(made):
        return made
    return made.model_copy(update={"corrected_from": cause_of(before), "corrected_step": step})


def who(layer: int | None, head: int | None) -> str:
    """The head or run that a verdict is of, at the start of a sentence."""
    return "The run" if layer is None else f"Layer {layer} head {head}"


def _sentence(subject: str, found: Finding, low: float | None, likely: float | None) -> str:
    """A finding in words, with its evidence in numbers. low, likely: steps until 512."""
    seen = found.evidence
    if found.signal == NON_FINITE:
        what = "its attention rows are"
        unknown = math.isnan(seen.suspect_step)
        sound = "a checkpoint before this step" if unknown else checkpoint_before(seen.suspect_step)
        return f"{subject}: {what} not finite. Every weight is at risk; go back to {sound}."
    if math.isnan(seen.window_steps):  # only a score that is dangerous trips before growth can be measured
        past = f"{subject}: its largest |score| is past {DANGEROUS_SCORE:.0f}"
        return f"{past}, before its growth could be measured; the cause looks like {found.cause}."
    drifts = found.signal == "offset"
    start, now = (seen.offset_before, seen.offset) if drifts else (seen.score_before, seen.score)
    what = "drifts: its scores moved as a whole from" if drifts else "grows: its largest |score| went from"
    moved = f"{'no longer ' if abs(now) < abs(start) else ''}{what} {_digits(start, 3)} to {_digits(now, 3)}"
    within = f"{' nats' if drifts else ''} in {seen.window_steps:.0f} steps"
    why = f"the cause looks like {found.cause}"
    if drifts and found.cause != "rounding":
        why = "that is consistent with rounding, which the delta bias does not show"
    course = ""
    if likely == 0:
        course = f" Its largest |score| is past {DANGEROUS_SCORE:.0f}."
    elif likely is not None and low is not None:
        course = f" At this pace its largest |score| reaches {DANGEROUS_SCORE:.0f} in about {_digits(likely, 2)} steps"
        course += f" ({_digits(low, 2)} at the earliest, if it continues)."
    elif not math.isnan(found.course):
        course = f" Its growth slows down: on this course its largest |score| stays below {DANGEROUS_SCORE:.0f}."
    return f"{subject} {moved}{within}; {why}.{course}"


def _digits(value: float, significant: int) -> str:
    """A number as people write it: `significant` significant digits, no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"
