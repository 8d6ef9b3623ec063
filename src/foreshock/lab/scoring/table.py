"""`foreshock lab score`: what scores add up to, that is detection, lead and false alarms of every monitor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.baselines import BASELINES
from foreshock.lab.scoring.score import OURS, QUIET_STEPS, Score, score_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One monitor on all runs that recorded what it reads. A failure is a natural one by rounding."""

    monitor: str
    threshold: float | None
    """as published; None of ours, which has many"""
    dangerous: int
    """failures in which a |score| reached 512, harmed or not"""
    warned: int
    """of those, before that"""
    median_lead: float | None
    """steps to 512, 0 for a run that was not warned about"""
    least_lead: float | None
    most_lead: float | None
    harmed: int
    """failures that came to harm"""
    in_time: int
    others: int
    """runs that a |score| of 512 or harm came to for another reason"""
    others_warned: int
    """of those, before the first of these"""
    healthy: int
    healthy_warned: int
    false_alarms: int
    possible_alarms: int
    """of a monitor that is never quiet: healthy runs in windows of QUIET_STEPS"""


def row(scores: Sequence[Score], monitor: str, threshold: float | None) -> Row:
    """One monitor on these runs."""
    heard = [(each, alarms) for each in scores if (alarms := each.alarms.get(monitor)) is not None]
    leads = [_lead(alarms, each.dangerous_step) for each, alarms in heard if each.failing and each.dangerous_step]
    harmed = [each for each, _ in heard if each.failing and each.harm_step is not None]
    others = [
        _lead(alarms, min(step for step in (each.harm_step, each.dangerous_step) if step is not None))
        for each, alarms in heard
        if not each.failing and each.truth != "treated" and (each.harm_step or each.dangerous_step) is not None
    ]
    healthy = [(each, alarms) for each, alarms in heard if each.healthy]
    return Row(
        monitor=monitor,
        threshold=threshold,
        dangerous=len(leads),
        warned=sum(lead > 0 for lead in leads),
        median_lead=float(np.median(leads)) if leads else None,
        least_lead=min(leads, default=None),
        most_lead=max(leads, default=None),
        harmed=len(harmed),
        in_time=sum(each.in_time(monitor) for each in harmed),
        others=len(others),
        others_warned=sum(lead > 0 for lead in others),
        healthy=len(healthy),
        healthy_warned=sum(bool(alarms) for _, alarms in healthy),
        false_alarms=sum(len(alarms) for _, alarms in healthy),
        possible_alarms=sum(math.ceil(each.steps / QUIET_STEPS) for each, _ in healthy),
    )


def _lead(alarms: Sequence[int], step: int | None) -> int:
    """Steps from the first alarm to `step`; 0 for none, or one that came later."""
    return max(step - alarms[0], 0) if alarms and step is not None else 0


def healthy_steps(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Healthy runs and steps of each set, those that detectors were tuned on apart, and of all."""
    groups: dict[tuple[str, bool | None], list[Score]] = {}
    for each in scores:
        if each.healthy:
            groups.setdefault((each.runs_of, each.split != "held-out"), []).append(each)
            groups.setdefault(("all", None), []).append(each)
    return [
        {
            "set": name,
            "tuned": tuned,
            "runs": len(runs),
            "steps": sum(each.steps for each in runs),
            "warned": sum(each.first_warning_step is not None for each in runs),
        }
        for (name, tuned), runs in sorted(groups.items(), key=lambda group: (group[0][0] == "all", *map(str, group[0])))
    ]


def precision(scores: Sequence[Score]) -> dict[str, int]:
    """Of observed runs in 16 bits whose first warning named rounding: how many failed, and how many of the others were
    cut short, so that nobody can say."""
    named = [each for each in scores if each.policy in (None, "observe") and each.rounds and each.cause == "rounding"]
    failed = [each for each in named if each.dangerous_step is not None or each.harm_step is not None]
    rest = [each for each in named if each not in failed]
    return {
        "warned_as_rounding": len(named),
        "failed": len(failed),
        "cut_short": sum(each.cut_short for each in rest),
        "ran_to_the_end": sum(not each.cut_short for each in rest),
    }


def forecasts(scores: Sequence[Score]) -> dict[str, float | None]:
    """Of the first warnings with a forecast about the head that came to 512 first: how many of these heads came no
    earlier than it said, and the least and the largest of the steps they took, in parts of the likely ones."""
    took = [
        (each.dangerous_step - each.first_warning_step, each.forecast_low_steps, each.forecast_steps)
        for each in scores
        if each.dangerous_step is not None and each.first_warning_step is not None and each.forecast_steps
        if each.failing_head == (each.layer, each.head) and each.first_warning_step < each.dangerous_step
    ]
    parts = [steps / likely for steps, _, likely in took]
    return {
        "came": len(took),
        "not_earlier": sum(low is not None and steps >= low for steps, low, _ in took),
        "least_part": min(parts, default=None),
        "most_part": max(parts, default=None),
    }


def lab_score(
    paths: Sequence[Path],
    *,
    report: Path | None = None,
    on_trace: Callable[[Path], None] = lambda path: None,
) -> tuple[list[Score], dict[str, Any]]:
    """Score every trace; the scores, and what `report` gets as JSON: traces, table, healthy steps, precision,
    forecasts.

    Raises ValueError for a file that is no trace.
    """
    scores = score_traces(list(map(read_trace, paths)), on_trace=lambda trace: on_trace(trace.path))
    monitors: list[tuple[str, float | None]] = [(OURS, None), *((each.name, each.threshold) for each in BASELINES)]
    result = {
        "traces": [asdict(each) for each in scores],
        "table": [asdict(row(scores, *monitor)) for monitor in monitors],
        "healthy": healthy_steps(scores),
        "precision": precision(scores),
        "forecasts": forecasts(scores),
    }
    if report is not None:
        report.write_bytes(to_json(result, indent=1, inf_nan_mode="strings") + b"\n")
    return scores, result
