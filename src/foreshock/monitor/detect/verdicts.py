"""Write verdicts on heads and on the run: their messages, and the fields that they take over from previous verdicts."""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.causes import Cause
from foreshock.contract.decision import cause_of, checkpoint_before
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.levels import KERNEL, LEVEL
from foreshock.monitor.detect.non_finite import NON_FINITE
from foreshock.monitor.detect.run_state import Alarm

CAME: Final = (0.14, 0.6)
"""The earliest and the median actual steps until 512 in the tuning runs, divided by the forecast steps and rounded
outwards (lab/NOTEBOOK.md). A latest step cannot be given, because some heads settle."""
_NEVER: Final = 1e9
"""More steps than any run has."""


class Finding(NamedTuple):
    """A current finding for a head, or for the run."""

    signal: str
    cause: Cause
    severity: wire.Severity

    def differs(self, before: wire.Verdict) -> bool:
        """Whether users should react differently than to the verdict `before`."""
        now = self.severity, self.cause, self.signal == NON_FINITE
        return now != (before.severity, before.cause, before.signal == NON_FINITE)


def verdict(
    found: Finding,
    evidence: Mapping[str, float],
    course: float,
    *,
    step: int,
    of: wire.HeadRef | None,
    before: Alarm | None,
    words: str = "",
) -> wire.Verdict:
    """Return the verdict for a finding.

    evidence: NaN for unknown values. course: steps until 512; inf if it levels off first, NaN if unknown. of: the head,
    None for the run. before: the active alarm; a different cause is reported as a correction. words: the message, if it
    is not composed from the evidence.
    """
    last = before.verdict if before else None
    ends = math.isfinite(course) and course < _NEVER
    low, likely = (part * course if ends else None for part in CAME)
    seen = {name: value for name, value in evidence.items() if math.isfinite(value)}
    if found.severity == "critical":  # a checkpoint from before this step is not damaged yet
        seen["critical_step"] = min(float(step), last.evidence.get("critical_step", math.inf) if last else math.inf)
    layer, head = of or (None, None)
    sentence = words or _sentence(f"Layer {layer} head {head}", found, evidence, course)
    if before and not words and before.tripped_step < step:
        sentence += f" No condition of a warning has been met since step {before.tripped_step:,}."
    made = wire.Verdict(
        id=last.id if last else f"{'run' if of is None else f'l{layer}h{head}'}-{step}",
        step=step,
        state="updated" if last else "raised",
        severity=found.severity,
        layer=layer,
        head=head,
        cause=found.cause,
        signal=found.signal,
        evidence=seen,
        corrected_from=last.corrected_from if last else None,
        corrected_step=last.corrected_step if last else None,
        forecast_steps=likely,
        forecast_low_steps=low,
        harm_in_sight=None if math.isnan(course) else ends,
        sentence=sentence,
    )
    if last is None or cause_of(last) == cause_of(made):
        return made
    return made.model_copy(update={"corrected_from": cause_of(last), "corrected_step": step})


def cleared(alarm: Alarm, step: int) -> wire.Verdict:
    """Return the cleared verdict of an alarm."""
    last, quiet = alarm.verdict, f"for {step - alarm.tripped_step:,} steps."
    who = "The run" if last.layer is None else f"Layer {last.layer} head {last.head}"
    sentence = f"{who} has met no condition of a warning {quiet}"
    if last.signal in (LEVEL, KERNEL):
        sentence = f"No head has {'passed this level' if last.signal == LEVEL else 'had a wrong row'} {quiet}"
    return last.model_copy(update={"step": step, "state": "cleared", "sentence": sentence})


def _sentence(subject: str, found: Finding, seen: Mapping[str, float], course: float) -> str:
    """Describe a finding in words, with its evidence as numbers."""
    why = f"the cause looks like {found.cause}"
    if found.signal == NON_FINITE:
        suspect = seen["suspect_step"]
        sound = "a checkpoint before this step" if math.isnan(suspect) else checkpoint_before(suspect)
        return f"{subject}: its attention rows are not finite. Every weight is at risk; go back to {sound}."
    if "window_steps" not in seen:  # before growth can be measured, only a dangerous score trips
        past = f"{subject}: its largest |score| is past {DANGEROUS_SCORE:.0f}"
        return f"{past}, before its growth could be measured; {why}."
    drifts = found.signal == "offset"
    start, now = seen[f"{found.signal}_before"], seen[found.signal]
    what = "drifts: its scores moved as a whole from" if drifts else "grows: its largest |score| went from"
    moved = f"{'no longer ' if abs(now) < abs(start) else ''}{what} {_digits(start, 3)} to {_digits(now, 3)}"
    within = f"{' nats' if drifts else ''} in {seen['window_steps']:.0f} steps"
    if drifts and found.cause != "rounding":
        why = "that is consistent with rounding, which the delta bias does not show"
    ahead = ""
    if course == 0:
        ahead = f" Its largest |score| is past {DANGEROUS_SCORE:.0f}."
    elif course < _NEVER:
        low, likely = (_digits(part * course, 2) for part in CAME)
        ahead = f" At this pace its largest |score| reaches {DANGEROUS_SCORE:.0f} in about {likely} steps"
        ahead += f" ({low} at the earliest, if it continues)."
    elif not math.isnan(course):
        ahead = f" Its growth slows down: on this course its largest |score| stays below {DANGEROUS_SCORE:.0f}."
    return f"{subject} {moved}{within}; {why}.{ahead}"


def _digits(value: float, significant: int) -> str:
    """Format a number with `significant` significant digits and without an exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"
