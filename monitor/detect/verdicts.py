"""Verdicts from their evidence: why a head is warned about, and in which words."""

import math
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.causes import CAUSES, Cause
from foreshock.contract.decision import cause_of, checkpoint_before
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, Forecast
from foreshock.monitor.detect.non_finite import NON_FINITE


class Evidence(NamedTuple):
    """What a verdict shows of a head; NaN where it is not known."""

    offset: float = math.nan
    offset_before: float = math.nan
    score: float = math.nan
    score_before: float = math.nan
    score_error: float = math.nan
    window_steps: float = math.nan
    delta_bias_z: float = math.nan
    suspect_step: float = math.nan


class Finding(NamedTuple):
    """The evidence of a head now, and what follows from it."""

    signal: str
    evidence: Evidence
    supported: bool
    """its delta bias supports its drift"""
    cause: Cause
    severity: wire.Severity


def cause(signal: str, score_before: float, *, rounds: bool, before: Cause | None) -> Cause:
    """Rounding moves all scores of a head the way of its delta bias (`rounds`); a step too large spreads them. It is
    not shown by growth from a score that was dangerous before: there it follows from the scores.

    before: the cause of the head's active verdict. It is corrected by what is known better, never taken back:
    a switch may have been founded on it.
    """
    found: Cause = "other" if signal == NON_FINITE else "score growth"
    if rounds and not score_before >= DANGEROUS_SCORE:
        found = "rounding"
    return found if before is None else min(found, before, key=list(CAUSES).index)


def verdict(
    found: Finding, *, step: int, layer: int | None, head: int | None, ahead: Forecast, before: wire.Verdict | None
) -> wire.Verdict:
    """A verdict of what is found. before: the verdict that is active; a cause that differs from its cause is given as
    its correction."""
    made = wire.Verdict(
        id=before.id if before else f"{'run' if layer is None else f'l{layer}h{head}'}-{step}",
        step=step,
        state="updated" if before else "raised",
        severity=found.severity,
        layer=layer,
        head=head,
        cause=found.cause,
        signal=found.signal,
        evidence={name: value for name, value in found.evidence._asdict().items() if math.isfinite(value)},
        corrected_from=before.corrected_from if before else None,
        corrected_step=before.corrected_step if before else None,
        sentence=sentence(who(layer, head), found, ahead),
        **ahead._asdict(),
    )
    if before is None or cause_of(before) == cause_of(made):
        return made
    return made.model_copy(update={"corrected_from": cause_of(before), "corrected_step": step})


def who(layer: int | None, head: int | None) -> str:
    """The head or run that a verdict is of, at the start of a sentence."""
    return "The run" if layer is None else f"Layer {layer} head {head}"


_SLOWS: Final = f" Its growth slows down: on this course its largest |score| stays below {DANGEROUS_SCORE:.0f}."


def sentence(subject: str, found: Finding, ahead: Forecast) -> str:
    """A finding in words, with its evidence in numbers."""
    seen = found.evidence
    if found.signal == NON_FINITE:
        what = "its attention rows are"
        unknown = math.isnan(seen.suspect_step)
        sound = "a checkpoint before this step" if unknown else checkpoint_before(seen.suspect_step)
        return f"{subject}: {what} not finite. Every weight is at risk; go back to {sound}."
    drifts = found.signal == "offset"
    start, now = (seen.offset_before, seen.offset) if drifts else (seen.score_before, seen.score)
    what = "drifts: its scores moved as a whole from" if drifts else "grows: its largest |score| went from"
    moved = f"{'no longer ' if abs(now) < abs(start) else ''}{what} {_digits(start, 3)} to {_digits(now, 3)}"
    course = _SLOWS if ahead.harm_in_sight is False else ""
    if ahead.forecast_steps == 0:
        course = f" Its largest |score| is past {DANGEROUS_SCORE:.0f}."
    elif ahead.forecast_steps is not None:
        likely, earliest, latest = (None if each is None else _digits(each, 2) for each in ahead[:3])
        within = f"{earliest} to {latest}" if latest else f"{earliest} at the earliest, if it goes on"
        course = f" At this pace its largest |score| reaches {DANGEROUS_SCORE:.0f} in about {likely} steps ({within})."
    within = f"{' nats' if drifts else ''} in {seen.window_steps:.0f} steps"
    return f"{subject} {moved}{within}; the cause looks like {found.cause}.{course}"


def _digits(value: float, significant: int) -> str:
    """A number as people write it: `significant` significant digits, no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"
