"""Verdicts from their evidence: why a head is warned about, how grave it is, and what was told of it before."""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.decision import cause_of
from foreshock.monitor.detect.forecast import Forecast, sentence
from foreshock.monitor.detect.signals import DANGEROUS_SCORE
from foreshock.monitor.detect.thresholds import DetectorConfig

_KNOWN: Final[tuple[wire.Cause, ...]] = ("other", "score growth", "rounding")
"""A later one takes more to be said."""


class Found(NamedTuple):
    """What is to be said of a head now."""

    signal: str
    seen: dict[str, float]
    supported: bool
    cause: wire.Cause
    severity: wire.Severity

    def is_news_after(self, told: wire.Verdict) -> bool:
        """Whether people would do something else than after that verdict."""
        now = self.severity, self.cause, self.signal == "nonfinite"
        return now != (told.severity, told.cause, told.signal == "nonfinite")


def verdict(
    found: Found, *, step: int, layer: int | None, head: int | None, ahead: Forecast, before: wire.Verdict | None
) -> wire.Verdict:
    """What is found in the form that is told. before: the word that stands; a cause that differs from its is told as
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
        evidence=found.seen,
        forecast_steps=ahead.likely,
        forecast_low_steps=ahead.earliest,
        forecast_high_steps=ahead.latest,
        harm_in_sight=ahead.in_sight,
        sentence="",
    )
    corrected = before is not None and cause_of(before) != cause_of(made)
    told: dict[str, object] = {"sentence": sentence(made)}
    if before is not None:
        told["corrected_from"] = cause_of(before) if corrected else before.corrected_from
        told["corrected_step"] = step if corrected else before.corrected_step
    return made.model_copy(update=told)


class Otherwise(NamedTuple):
    """What stands of growth that was not shown to be rounding."""

    first: wire.Cause | None = None
    """the cause of the oldest such warning"""
    dangerous: bool = False
    """whether one is critical, and no delta bias supports it"""

    def after(self, told: wire.Verdict | Found, *, explained: bool) -> "Otherwise":
        """With one warning more; explained: the delta bias of its head supports its drift by now."""
        if told.cause == "rounding" or told.signal == "nonfinite":
            return self
        dangerous = told.severity == "critical" and not explained
        return Otherwise(self.first or told.cause, self.dangerous or dangerous)


def supported(seen: Mapping[str, float], least: float, shared_part: float) -> bool:
    """Whether the delta bias is `least` standard errors or more, the way that the offset has gone, and the offset moved
    by `shared_part` of what the largest score grew by or more."""
    return _push(seen) >= least and _moved(seen) >= shared_part * _grown(seen)


def _moved(seen: Mapping[str, float]) -> float:
    """By how much the offset is farther from zero; through zero, all of the way counts."""
    now, start = seen.get("offset", 0.0), seen.get("offset_before", 0.0)
    return abs(now - start) if abs(now) > abs(start) else 0.0


def _grown(seen: Mapping[str, float]) -> float:
    """By how much the largest score grew, but for what noise may have made of it; nothing where it is unknown."""
    if "score" not in seen:
        return 0.0
    return seen["score"] - seen.get("score_before", 0.0) - seen.get("score_error", 0.0)


def cause(
    signal: str,
    seen: Mapping[str, float],
    *,
    supported: bool,
    can_round: bool,
    left_track: bool,
    least_change: float,
    before: wire.Cause | None,
    first: wire.Cause | None,
) -> wire.Cause:
    """Rounding moves all scores of a head the way its delta bias pushes; a step too large spreads them.

    Where the loss has left its track first (`left_track`), something else came before the scores. No head fails by
    rounding where nothing rounds, where its delta is exact, or before growth is judged (`can_round`): a score that is
    dangerous so early was not reached by a drift. Nor is rounding shown by growth from a score that was dangerous
    before: there it follows from the scores. Where no bias was recorded, an offset that moved by half of what the
    largest score did is enough.
    before: the cause that a standing warning was told under. It is corrected by what is known better, never taken back:
    a switch may have been founded on it. first: that of the oldest standing warning of growth that is not rounding; a
    noisy loss would part the heads of one failure into two.
    """
    found = _cause(signal, seen, supported, can_round, left_track, least_change)
    if found != "rounding" and signal != "nonfinite":
        found = first or found
    return found if before is None else max(found, before, key=_KNOWN.index)


def _cause(
    signal: str, seen: Mapping[str, float], supported: bool, can_round: bool, left_track: bool, least_change: float
) -> wire.Cause:
    if ("offset" not in seen and "score" not in seen) or left_track:
        return "other"
    growth: wire.Cause = "score growth" if signal != "nonfinite" else "other"
    if not can_round or seen.get("score_before", 0.0) >= DANGEROUS_SCORE:
        return growth
    now, start = seen.get("offset", 0.0), seen.get("offset_before", 0.0)
    moved = abs(now - start) if abs(now) > abs(start) else 0.0  # through zero, all of the way counts
    grown = seen.get("score", math.inf) - seen.get("score_before", 0.0)
    together = moved >= grown / 2 - seen.get("score_error", 0.0)
    pushed = supported or (together and math.isnan(_push(seen)))
    return "rounding" if moved >= least_change and pushed else growth


def severity(signal: str, seen: Mapping[str, float], *, supported: bool, config: DetectorConfig) -> wire.Severity:
    """Critical: numbers are not finite, harm comes by a cause that is supported, or the score is dangerous already."""
    critical = signal == "nonfinite" or seen.get("score", 0.0) >= (config.score_level if supported else DANGEROUS_SCORE)
    return "critical" if critical else "warning"


def _push(seen: Mapping[str, float]) -> float:
    return seen.get("delta_bias_z", math.nan) * math.copysign(1.0, seen.get("offset", 0.0))
