"""Verdicts from their evidence: why a head is warned about, and in which words."""

import math
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.decision import cause_of
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, Forecast
from foreshock.monitor.detect.non_finite import NON_FINITE

_KNOWN: Final[tuple[wire.Cause, ...]] = ("other", "score growth", "rounding")
"""Causes in the order of the evidence that each takes."""
_PHRASES: Final = {
    "offset": ("drifts: its scores moved as a whole from", " nats"),
    "score": ("grows: its largest |score| went from", ""),
}


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
    cause: wire.Cause
    severity: wire.Severity

    def is_news_after(self, before: wire.Verdict) -> bool:
        """Whether people would do something else than after that verdict."""
        now = self.severity, self.cause, self.signal == NON_FINITE
        return now != (before.severity, before.cause, before.signal == NON_FINITE)


def cause(signal: str, score_before: float, *, rounds: bool, before: wire.Cause | None) -> wire.Cause:
    """Rounding moves all scores of a head the way of its delta bias (`rounds`); a step too large spreads them. It is
    not shown by growth from a score that was dangerous before: there it follows from the scores.

    before: the cause of the head's active verdict. It is corrected by what is known better, never taken back:
    a switch may have been founded on it.
    """
    found: wire.Cause = "other" if signal == NON_FINITE else "score growth"
    if rounds and not score_before >= DANGEROUS_SCORE:
        found = "rounding"
    return found if before is None else max(found, before, key=_KNOWN.index)


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
        **ahead._asdict(),
        sentence="",
    )
    update: dict[str, object] = {"sentence": sentence(made)}
    if before is not None:
        corrected = cause_of(before) != cause_of(made)
        update["corrected_from"] = cause_of(before) if corrected else before.corrected_from
        update["corrected_step"] = step if corrected else before.corrected_step
    return made.model_copy(update=update)


def who(verdict: wire.Verdict) -> str:
    """The head or run that a verdict is of, at the start of a sentence."""
    return "The run" if verdict.layer is None else f"Layer {verdict.layer} head {verdict.head}"


def sentence(verdict: wire.Verdict) -> str:
    """The verdict in words, with its evidence in numbers."""
    subject, seen = who(verdict), verdict.evidence
    if verdict.signal == NON_FINITE:
        what = "its loss or gradient norm is" if verdict.layer is None else "its attention rows are"
        since = f"step {seen['suspect_step']:,.0f}" if "suspect_step" in seen else "this step"
        return f"{subject}: {what} not finite. Every weight is at risk; go back to a checkpoint before {since}."
    (phrase, unit), now = _PHRASES[verdict.signal], seen.get(verdict.signal, math.nan)
    start = seen.get(f"{verdict.signal}_before", math.nan)
    falls = "no longer " if abs(now) < abs(start) else ""
    moved = (
        f"{falls}{phrase} {_digits(start, 3)} to {_digits(now, 3)}{unit} in {seen.get('window_steps', 0.0):.0f} steps"
    )
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
    return f"{subject} {moved}; the cause looks like {verdict.cause}.{ahead}"


def _digits(value: float, significant: int) -> str:
    """A number as people write it: `significant` significant digits, no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"
