"""`foreshock lab score`: what scores add up to, that is detection, lead and false alarms of every monitor, by split."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.baselines import BASELINES
from foreshock.lab.scoring.calibration import calibration
from foreshock.lab.scoring.incident_table import incident_rows
from foreshock.lab.scoring.intervals import Interval, over_runs, poisson_upper_bound, share_interval
from foreshock.lab.scoring.score import (
    DETECTORS,
    OURS,
    QUIET_STEPS,
    Score,
    alarms,
    asked_lead,
    heard_of,
    lead_before,
    score_traces,
)
from foreshock.lab.scoring.sealed import break_seal
from foreshock.monitor.detect.detectors import DetectorConfig


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
        median_lead_interval=over_runs(leads),
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


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """The report of `foreshock lab score`."""
    return {
        "traces": [each.report() for each in scores],
        "table": [asdict(each) for each in table(scores)],
        "incidents": [asdict(each) for each in incident_rows(scores)],
        "forecasts": {
            split: calibration(forecast for each in scores if each.split == split for forecast in each.forecasts)
            for split in sorted({each.split for each in scores}, reverse=True)
        },
    }


def lab_score(
    paths: Sequence[Path],
    *,
    report: Path | None = None,
    seal: Path | None = None,
    on_trace: Callable[[Path], None] = lambda path: None,
) -> tuple[list[Score], dict[str, Any]]:
    """Score every trace; the scores, and what `report` gets as JSON: traces, table, incidents, forecasts.

    `seal` is where it is written down that held-out runs on real text were scored. Raises ValueError for a file that is
    no trace, and for held-out runs that may not be scored (`foreshock.lab.scoring.sealed`).
    """
    break_seal(paths, DetectorConfig(), seal)
    scores = score_traces(list(map(read_trace, paths)), on_trace=lambda trace: on_trace(trace.path))
    result = as_json(scores)
    if report is not None:
        report.write_text(json.dumps(_plain(result), indent=1) + "\n")
    return scores, result


def _plain(value: Any) -> Any:
    """The same without what strict JSON lacks: a number that is not finite becomes its name."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
