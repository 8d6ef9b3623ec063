"""`foreshock lab score`: evaluate the detectors and the baseline monitors on recorded runs.

A baseline is a signal that rises with the danger, and its published threshold. It raises alarms, at most one in 2000
steps, while its signal is at or above the threshold. The alarms of foreshock are the warnings of a replay with the
default settings. The first alarm before the first harm (harm.py) is the warning, and the steps between the two are its
lead. Every alarm of a healthy run is false.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic_core import to_json

from foreshock.contract.slots import Floats
from foreshock.contract.wire import HeadRef
from foreshock.lab.recording.harm import first_harm
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import Trace, read_trace, readings
from foreshock.lab.scoring.baselines import BASELINES, Signal
from foreshock.monitor.detect.detectors import DetectorConfig
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE

OURS: Final = "foreshock"
ASKED_LEAD_STEPS: Final = 1000
"""Steps before the first harm at which a warning is in time; half of the harm's step if that is less."""
QUIET_STEPS: Final = DetectorConfig().quiet_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of one trace; a field is None if the event did not happen."""

    trace: str
    runs_of: str
    """name of the set of runs: the folder of the trace"""
    truth: str
    """the outcome that the run was designed to show: healthy, rounding, score growth, other or treated"""
    natural: bool
    """whether the run had no injected fault"""
    tuned: bool
    """whether the detectors were tuned on this run"""
    observed: bool
    """whether attention was computed in a 16-bit type, and the policy did not act"""
    steps: int
    cut_short: bool
    """whether the run ended before the last step of its recipe"""
    harm_step: int | None
    dangerous_step: int | None
    """the first step at which the largest |score| of any head was 512 or more"""
    failing_head: HeadRef | None
    """the first head whose |score| reached 512; None also if several heads have the same largest score"""
    first_warning_step: int | None
    layer: int | None
    head: int | None
    cause: str | None
    signal: str | None
    forecast_steps: float | None
    forecast_low_steps: float | None
    warnings: int
    """number of raised verdicts, without those of severity info"""
    alarms: dict[str, list[int] | None]
    """alarm steps by monitor; None if the trace lacks the values that the monitor reads"""

    @property
    def healthy(self) -> bool:
        """Whether a run designed to be healthy was: without harm, and every |score| below 512."""
        return self.truth == "healthy" and self.failed_at is None

    @property
    def failing(self) -> bool:
        """Whether the run was designed to fail by rounding without an injected fault."""
        return self.truth == "rounding" and self.natural

    @property
    def failed_at(self) -> int | None:
        """The first step of harm or of a |score| of 512, whichever is earlier."""
        return min((step for step in (self.harm_step, self.dangerous_step) if step is not None), default=None)

    def in_time(self, monitor: str) -> bool:
        """Whether the first alarm of a harmed run came early enough (ASKED_LEAD_STEPS)."""
        heard, harm = self.alarms[monitor], self.harm_step
        return bool(heard and harm and harm - heard[0] >= min(ASKED_LEAD_STEPS, harm / 2))


def score_traces(traces: Sequence[Trace], config: DetectorConfig | None = None) -> Iterator[Score]:
    """Score traces one by one, each compared with its control if `traces` contains it."""
    controls = {_run(trace): trace for trace in traces if trace.header.get("arm") == "control"}
    for trace in traces:
        control = controls.get(_run(trace))
        yield _score(trace, config or DetectorConfig(), None if control is trace else control)


def _run(trace: Trace) -> tuple[Any, Any]:
    return trace.header.get("recipe"), trace.header.get("seed")


def _score(trace: Trace, config: DetectorConfig, control: Trace | None) -> Score:
    raised = [each for each in verdicts(trace, config) if each.state == "raised" and each.severity != "info"]
    first = raised[0] if raised else None
    heard: dict[str, list[int] | None] = {OURS: [verdict.step for verdict in raised]}
    for baseline in BASELINES:
        signal = baseline.signal(trace)
        heard[baseline.name] = None if signal is None else alarms(signal, baseline.threshold)
    dangerous, failing = _first_dangerous(trace)
    header, steps = trace.header, trace.samples[-1].step
    of_first = ("layer", "head", "cause", "signal", "forecast_steps", "forecast_low_steps")
    return Score(
        trace=trace.name,
        runs_of=trace.path.parent.name,
        truth=truth(trace),
        natural=header.get("nature", "natural") == "natural",
        tuned=header.get("split") != "held-out",
        observed=trace.rounds and header.get("policy") in (None, "observe"),
        steps=steps,
        cut_short=steps < header.get("steps", 0),
        harm_step=first_harm(trace.steps, None if control is None else control.steps),
        dangerous_step=dangerous,
        failing_head=failing,
        first_warning_step=first.step if first else None,
        **{name: getattr(first, name, None) for name in of_first},
        warnings=len(raised),
        alarms=heard,
    )


def truth(trace: Trace) -> str:
    """Return the outcome that a run was designed to show.

    If the header does not say, the truth is "healthy" for float32 and "rounding" otherwise. A run of a failing recipe
    with a mitigation from the first step (such as exact delta) is "treated": it counts neither as healthy nor as
    failing, because the mitigation may be insufficient.
    """
    recorded, variant = trace.header.get("truth"), str(trace.header.get("arm", ""))
    if recorded is None:
        return "healthy" if not trace.rounds or variant == "control" else "rounding"
    treated = recorded == "healthy" and trace.rounds and variant != "control" and not variant.endswith("untreated")
    return "treated" if treated else str(recorded)


def _first_dangerous(trace: Trace) -> tuple[int | None, HeadRef | None]:
    """Return the first step with a |score| of 512, and its head; None for the head if several have the same score."""
    for reading in readings(trace):
        scores: Floats = reading.largest_score
        if (scores >= DANGEROUS_SCORE).any():
            largest = np.flatnonzero(scores == np.nanmax(scores))
            return reading.step, trace.heads[largest[0]] if len(largest) == 1 else None
    return None, None


def alarms(signal: Signal, threshold: float, spacing_steps: int = QUIET_STEPS) -> list[int]:
    """Return the alarm steps: steps with a signal at or above the threshold, at least `spacing_steps` apart.

    A signal that stays above its threshold raises repeated alarms; one that crosses it often does not raise more.
    """
    with np.errstate(invalid="ignore"):
        beyond = signal.step[signal.value >= threshold]
    found: list[int] = []
    while len(beyond):
        found.append(int(beyond[0]))
        beyond = beyond[np.searchsorted(beyond, found[-1] + spacing_steps) :]
    return found


def of_monitor(scores: Sequence[Score], monitor: str, threshold: float | None) -> dict[str, Any]:
    """Summarise one monitor over all runs that recorded the values that it reads.

    A failure is a run that failed by rounding without an injected fault (`Score.failing`).
    threshold: as published; None for foreshock, which has several. dangerous: failures in which a |score| reached 512,
    with or without harm; warned: those of them with an alarm before that step. Leads: steps from the first alarm to
    512, 0 without an alarm. harmed: failures with harm; in_time: those of them with an alarm early enough. others: runs
    with harm or a |score| of 512 for another reason; others_warned: those of them with an alarm before that step.
    possible_alarms: alarms in healthy runs of a monitor whose signal is always above its threshold.
    """
    heard = [(each, alarms) for each in scores if (alarms := each.alarms.get(monitor)) is not None]
    leads = [_lead(alarms, each.dangerous_step) for each, alarms in heard if each.failing and each.dangerous_step]
    harmed = [each for each, _ in heard if each.failing and each.harm_step is not None]
    others = [
        _lead(alarms, each.failed_at)
        for each, alarms in heard
        if not each.failing and each.truth != "treated" and each.failed_at is not None
    ]
    healthy = [(each, alarms) for each, alarms in heard if each.healthy]
    return {
        "monitor": monitor,
        "threshold": threshold,
        "dangerous": len(leads),
        "warned": sum(lead > 0 for lead in leads),
        "median_lead": float(np.median(leads)) if leads else None,
        "least_lead": min(leads, default=None),
        "most_lead": max(leads, default=None),
        "harmed": len(harmed),
        "in_time": sum(each.in_time(monitor) for each in harmed),
        "others": len(others),
        "others_warned": sum(lead > 0 for lead in others),
        "healthy": len(healthy),
        "healthy_warned": sum(bool(alarms) for _, alarms in healthy),
        "false_alarms": sum(len(alarms) for _, alarms in healthy),
        "possible_alarms": sum(math.ceil(each.steps / QUIET_STEPS) for each, _ in healthy),
    }


def _lead(alarms: Sequence[int], step: int | None) -> int:
    """Steps from the first alarm to `step`; 0 without an alarm, or if it came later."""
    return max(step - alarms[0], 0) if alarms and step is not None else 0


def healthy_steps(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Count healthy runs and their steps: for each set, split by `tuned`, and for all sets."""
    groups: dict[tuple[str, bool | None], list[Score]] = {}
    for each in scores:
        if each.healthy:
            groups.setdefault((each.runs_of, each.tuned), []).append(each)
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
    """Count the observed runs whose first warning gave the cause rounding, by what happened afterwards.

    They failed, or ran to the end without a failure, or were cut short, so that their outcome is unknown.
    """
    named = [each for each in scores if each.observed and each.cause == "rounding"]
    rest = [each for each in named if each.failed_at is None]
    return {
        "warned_as_rounding": len(named),
        "failed": len(named) - len(rest),
        "cut_short": sum(each.cut_short for each in rest),
        "ran_to_the_end": sum(not each.cut_short for each in rest),
    }


def forecasts(scores: Sequence[Score]) -> dict[str, float | None]:
    """Compare forecasts with outcomes, for runs whose first warning had a forecast for the head that reached 512 first.

    came: such runs; not_earlier: those whose head reached 512 at or after the earliest forecast step. least_part and
    most_part: the smallest and largest ratio of actual steps to forecast steps.
    """
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


def lab_score(paths: Sequence[Path], *, report: Path | None = None) -> tuple[list[Score], dict[str, Any]]:
    """Score every trace; return the scores, and the content of `report`, which is written as JSON.

    The report contains the traces, the table of monitors, healthy steps, precision and forecasts. Raises ValueError for
    a file that is not a trace.
    """
    scores = list(score_traces(list(map(read_trace, paths))))
    monitors: list[tuple[str, float | None]] = [(OURS, None), *((each.name, each.threshold) for each in BASELINES)]
    result = {
        "traces": [asdict(each) for each in scores],
        "table": [of_monitor(scores, *monitor) for monitor in monitors],
        "healthy": healthy_steps(scores),
        "precision": precision(scores),
        "forecasts": forecasts(scores),
    }
    if report is not None:
        report.write_bytes(to_json(result, indent=1, inf_nan_mode="strings") + b"\n")
    return scores, result
