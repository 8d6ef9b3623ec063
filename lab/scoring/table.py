"""What scores add up to: detection, lead and false alarms of every monitor, by split, and their trade-off."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from foreshock.lab.scoring.baselines import BASELINES
from foreshock.lab.scoring.calibration import calibration
from foreshock.lab.scoring.incident_table import incident_rows
from foreshock.lab.scoring.intervals import Interval, over_runs, poisson_upper_bound, share_interval
from foreshock.lab.scoring.score import DETECTORS, OURS, QUIET_STEPS, Score, alarms, asked_lead, heard_of, lead_before

_POINTS_OF_A_CURVE: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One monitor at one threshold on the runs of one split."""

    monitor: str
    threshold: float
    kind: str
    """shipped, published or calibrated: the lowest that no healthy run of the tuning set reaches"""
    split: str
    failures: int
    """natural rounding failures that came to harm and that recorded what the monitor reads"""
    warned: int
    """of those, before harm"""
    in_time: int
    in_time_interval: Interval | None
    """of the share in time, over runs, 95 % (Clopper and Pearson)"""
    median_lead_steps: float | None
    """over all failures, 0 for one that was not warned about"""
    median_lead_interval: Interval | None
    """over runs drawn with replacement, 95 %"""
    dangerous: int
    """natural rounding runs in which a |score| reached 512, harmed or not, and that recorded what the monitor reads"""
    warned_before_dangerous: int
    median_lead_to_dangerous_steps: float | None
    least_lead_to_dangerous_steps: float | None
    most_lead_to_dangerous_steps: float | None
    other_failures: int
    """harmed runs whose cause is not rounding"""
    other_warned: int
    false_alarms: int
    possible_alarms: int
    """of a monitor that is never quiet: healthy runs in windows of QUIET_STEPS"""
    healthy_steps: int
    false_alarms_per_10k: float | None
    upper_bound_per_10k: float | None
    """exact Poisson, one-sided, 95 %"""
    causes: int
    """runs made to fail, of any cause, that our verdict warned about"""
    causes_right: int


def calibrated(scores: Iterable[Score], monitor: str) -> float | None:
    """Just above everything that the healthy runs of the tuning set reached; None when none recorded it."""
    highest = [
        float(np.nanmax(each.signals[monitor].value))
        for each in scores
        if each.healthy and each.split == "tuning" and monitor in each.signals and len(each.signals[monitor].value)
    ]
    return float(np.nextafter(max(highest), math.inf)) if highest else None


def row(scores: Iterable[Score], monitor: str, threshold: float, kind: str, split: str) -> Row:
    """One monitor at one threshold. Runs that did not record what it reads are left out."""
    failures, others, leads, to_dangerous = 0, [0, 0], [], []
    in_time, false_alarms, possible, healthy_steps, causes, right = 0, 0, 0, 0, 0, 0
    for each in scores:
        if monitor not in each.signals:
            continue
        heard = heard_of(each, monitor, threshold)
        if each.healthy:
            false_alarms += max(
                len(alarms(each.signals[monitor], threshold)), each.warnings * (kind == "shipped" and monitor == OURS)
            )
            healthy_steps += each.steps
            possible += math.ceil(each.steps / QUIET_STEPS)
        if each.truth in ("healthy", "treated"):
            continue
        if monitor == OURS and each.first_warning_step is not None:
            causes += 1
            right += each.cause == each.truth
        if each.natural_rounding and each.any_dangerous_step is not None:
            to_dangerous.append(lead_before(heard, each.any_dangerous_step))
        if each.harm_step is None:
            continue
        lead = lead_before(heard, each.harm_step)
        if each.failed:
            failures += 1
            leads.append(lead)
            in_time += lead >= asked_lead(each.harm_step)
        elif each.truth != "rounding":
            others[0] += 1
            others[1] += lead > 0
    per_10k = 1e4 / healthy_steps if healthy_steps else None
    return Row(
        monitor=monitor,
        threshold=threshold,
        kind=kind,
        split=split,
        failures=failures,
        warned=sum(lead > 0 for lead in leads),
        in_time=in_time,
        in_time_interval=share_interval(in_time, failures),
        median_lead_steps=float(np.median(leads)) if leads else None,
        median_lead_interval=over_runs(leads, "median"),
        dangerous=len(to_dangerous),
        warned_before_dangerous=sum(lead > 0 for lead in to_dangerous),
        median_lead_to_dangerous_steps=float(np.median(to_dangerous)) if to_dangerous else None,
        least_lead_to_dangerous_steps=float(min(to_dangerous)) if to_dangerous else None,
        most_lead_to_dangerous_steps=float(max(to_dangerous)) if to_dangerous else None,
        other_failures=others[0],
        other_warned=others[1],
        false_alarms=false_alarms,
        possible_alarms=possible,
        healthy_steps=healthy_steps,
        false_alarms_per_10k=None if per_10k is None else false_alarms * per_10k,
        upper_bound_per_10k=None if per_10k is None else poisson_upper_bound(false_alarms) * per_10k,
        causes=causes,
        causes_right=right,
    )


def table(scores: Sequence[Score]) -> list[Row]:
    """Every monitor at its thresholds, on every split that the scores speak of."""
    thresholds: list[tuple[str, float, str]] = [(name, 1.0, "shipped") for name in DETECTORS]
    for baseline in BASELINES:
        if baseline.threshold is not None:
            thresholds.append((baseline.name, baseline.threshold, "published"))
        quiet = calibrated(scores, baseline.name)
        if quiet is not None and math.isfinite(quiet):
            thresholds.append((baseline.name, quiet, "calibrated"))
    return [
        row([each for each in scores if each.split == split], name, threshold, kind, split)
        for split in sorted({each.split for each in scores}, reverse=True)
        for name, threshold, kind in thresholds
    ]


def curves(scores: Sequence[Score]) -> dict[str, list[dict[str, float]]]:
    """For every monitor, false alarms per 10,000 healthy steps and median lead as its threshold moves.

    The thresholds are quantiles of the highest values of the runs. Empty without healthy runs or without failures.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for monitor in (*DETECTORS, *(baseline.name for baseline in BASELINES)):
        seen = [each for each in scores if monitor in each.signals and len(each.signals[monitor].value)]
        values = np.concatenate([np.zeros(0), *(each.signals[monitor].value for each in seen)])
        values = values[np.isfinite(values)]
        if not len(values):
            continue
        upper = np.geomspace(0.5, 1e-6, _POINTS_OF_A_CURVE)
        points = []
        quantiles = np.quantile(values, 1 - upper, method="lower")
        for threshold in np.unique(np.append(quantiles, 1.0 if monitor in DETECTORS else quantiles[:1])).tolist():
            point = row(seen, monitor, threshold, "swept", "")
            if point.median_lead_steps is None or point.false_alarms_per_10k is None:
                break
            points.append(
                {
                    "threshold": threshold,
                    "false_alarms_per_10k": point.false_alarms_per_10k,
                    "median_lead_steps": point.median_lead_steps,
                    "warned_share": point.warned / point.failures,
                }
            )
        if points:
            found[monitor] = points
    return found


def matched(points: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """The longest median lead of every monitor at no more false alarms than our shipped verdict has."""
    return {monitor: 0.0 if best is None else best["median_lead_steps"] for monitor, best in _matched(points).items()}


def _matched(points: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float] | None]:
    """The point of every monitor's curve with the longest lead at no more false alarms than ours; None without one."""
    ours = [each["false_alarms_per_10k"] for each in points.get(OURS, []) if each["threshold"] >= 1.0]
    if not ours:
        return {}
    allowed = {name: [p for p in each if p["false_alarms_per_10k"] <= max(ours)] for name, each in points.items()}
    return {
        name: max(each, key=lambda point: point["median_lead_steps"], default=None) for name, each in allowed.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Our shipped verdict beside a baseline at no more false alarms than ours, failure by failure."""

    monitor: str
    threshold: float
    failures: int
    earlier: int
    """failures that we warned about earlier than it"""
    later: int
    mean_lead_more: float
    """mean over the failures of our lead less its own, in steps"""
    mean_lead_more_interval: Interval | None
    """over runs drawn with replacement, 95 %"""


def paired(scores: Sequence[Score], points: dict[str, list[dict[str, float]]]) -> list[Paired]:
    """Every baseline that has such a threshold, on the natural rounding failures that recorded what it reads."""
    found = []
    for monitor, best in _matched(points).items():
        if best is None or monitor in DETECTORS:
            continue
        more = [
            lead_before(heard_of(each, OURS, 1.0), each.harm_step)
            - lead_before(heard_of(each, monitor, best["threshold"]), each.harm_step)
            for each in scores
            if each.failed and each.harm_step is not None and monitor in each.signals
        ]
        found.append(
            Paired(
                monitor=monitor,
                threshold=best["threshold"],
                failures=len(more),
                earlier=sum(steps > 0 for steps in more),
                later=sum(steps < 0 for steps in more),
                mean_lead_more=float(np.mean(more)),
                mean_lead_more_interval=over_runs(more, "mean"),
            )
        )
    return found


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """The report of `foreshock lab score`; the curves are of the held-out runs where these have any."""
    seen = [each for each in scores if each.split == "held-out"]
    held_out = curves(seen)
    points = held_out or curves(scores)
    return {
        "traces": [each.report() for each in scores],
        "table": [asdict(each) for each in table(scores)],
        "incidents": [asdict(each) for each in incident_rows(scores)],
        "forecasts": {
            split: calibration(forecast for each in scores if each.split == split for forecast in each.forecasts)
            for split in sorted({each.split for each in scores}, reverse=True)
        },
        "curves_of": "held-out" if held_out else "all",
        "curves": points,
        "lead_at_our_false_alarms": matched(points),
        "paired": [asdict(each) for each in paired(seen if held_out else scores, points)],
    }
