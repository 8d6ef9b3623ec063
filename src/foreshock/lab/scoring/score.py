"""Scores detectors and baselines on recorded runs: who was warned about, when, why, and how good the forecast was.

Every monitor is a signal that rises with the danger and a threshold. What it says of one run are alarms, at most one in
2000 steps for as long as the signal is at the threshold. The first alarm before the first harm (harm.py)
is the warning, and the steps between them its lead; alarms of healthy runs are false. Our own verdict is scored at the
shipped thresholds; a baseline at the published one, where there is one, and at one calibrated on the tuning set.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.contract.wire import HeadRef
from foreshock.lab.recording.harm import AGAINST_CONTROL, Limits, first_harm
from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.baselines import BASELINES, Signal
from foreshock.lab.scoring.calibration import Forecast, forecasts_of
from foreshock.lab.scoring.incidents import Opened, OpenIncident, failing_head, incident_at, opened
from foreshock.lab.scoring.noise import controls_of, limits_of_recipes
from foreshock.lab.training.arm import CONTROL
from foreshock.lab.training.real_text_split import assigned
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.growth import SIGNAL_NAMES

OURS: Final = "foreshock"
"""The verdict that joins the detectors."""
DETECTORS: Final = (OURS, *(f"foreshock: {name}" for name in SIGNAL_NAMES))
NOT_RECORDED: Final = "not recorded"
_OF_THE_WARNING: Final = (
    *("layer", "head", "cause", "signal"),
    *("forecast_steps", "forecast_low_steps", "forecast_high_steps"),
)
ASKED_LEAD_STEPS: Final = 1000
"""A warning is in time this many steps before the first harm, or half of the run's life before it if that is less."""
QUIET_STEPS: Final = DetectorConfig().quiet_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One trace as it was seen; None where no warning came or nothing happened."""

    file: str
    recipe: str
    arm: str
    seed: int | None
    split: str
    """tuning, held-out or unassigned"""
    truth: str
    """what the run was made to show: healthy, rounding, score growth, other or treated"""
    nature: str
    """natural or injected"""
    steps: int
    harm_step: int | None
    harm_by: str | None
    harm_against: str | None
    dangerous_step: int | None
    """when the largest |score| of the named head reached 512"""
    any_dangerous_step: int | None
    """when that of any head did"""
    first_warning_step: int | None
    layer: int | None
    head: int | None
    cause: str | None
    signal: str | None
    forecast_steps: float | None
    forecast_low_steps: float | None
    forecast_high_steps: float | None
    warnings: int
    """verdicts raised in all"""
    incidents: list[Opened]
    """what these come to, in the order in which they opened"""
    forecasts: list[Forecast]
    """of the first warning about every head, against what came"""
    failing_head: HeadRef | None
    """of a run that failed"""
    told_in_time: OpenIncident | None
    """what stood on the page of a run that failed, as late as a warning is in time"""
    harm_limits: Limits | None
    """where they come from repeated controls of its recipe"""
    first_steps: dict[str, int | str | None]
    """first alarm of every detector and baseline: null when quiet, or "not recorded"; a baseline without a published
    threshold is quiet until it is calibrated"""
    signals: dict[str, Signal] = field(repr=False)

    @property
    def healthy(self) -> bool:
        """Made to be healthy, and it was: no harm, and no |score| that reached 512."""
        return self.truth == "healthy" and self.harm_step is None and self.any_dangerous_step is None

    @property
    def natural_rounding(self) -> bool:
        """Made to fail by rounding, with nothing injected."""
        return (self.truth, self.nature) == ("rounding", "natural")

    @property
    def failed(self) -> bool:
        """A natural failure by rounding, with quality loss."""
        return self.natural_rounding and self.harm_step is not None

    def report(self) -> dict[str, Any]:
        """For JSON."""
        report = {name: getattr(self, name) for name in self.__slots__ if name != "signals"}
        for name in ("incidents", "forecasts"):
            report[name] = [asdict(each) for each in report[name]]
        for name in ("told_in_time", "harm_limits"):
            report[name] = None if report[name] is None else asdict(report[name])
        return report


def asked_lead(harm_step: int) -> float:
    """Steps before the first harm by which a warning is in time."""
    return min(ASKED_LEAD_STEPS, harm_step / 2)


def _score(trace: Trace, config: DetectorConfig, control: Trace | None, limits: Limits | None) -> Score:
    verdicts, signals = _watched(trace, config)
    raised = [verdict for verdict in verdicts if verdict.state == "raised"]
    first = raised[0] if raised else None
    harm = first_harm(trace.steps, None if control is None else control.steps, limits or AGAINST_CONTROL)
    dangerous = dangerous_step(trace)
    failed = harm is not None or dangerous is not None
    steps: dict[str, int | str | None] = {}
    for name in DETECTORS:
        steps[name] = _first(alarms(signals[name], 1.0))
    steps[OURS] = first.step if first else None
    for baseline in BASELINES:
        found = baseline.signal(trace)
        if found is None:
            steps[baseline.name] = NOT_RECORDED
            continue
        judged = found.step >= config.earliest_steps  # as ours: growth is not judged while a run begins
        found = signals[baseline.name] = Signal(found.step[judged], found.value[judged])
        steps[baseline.name] = None if baseline.threshold is None else _first(alarms(found, baseline.threshold))
    header = trace.header
    return Score(
        file=trace.path.name,
        recipe=str(header.get("recipe", "")),
        arm=str(header.get("arm", "")),
        seed=header.get("seed"),
        split=split(trace),
        truth=truth(trace),
        nature=str(header.get("nature", "natural")),
        steps=trace.samples[-1].step,
        harm_step=harm.step if harm else None,
        harm_by=harm.by if harm else None,
        harm_against=harm.against if harm else None,
        dangerous_step=dangerous_step(trace, first) if first else None,
        any_dangerous_step=dangerous,
        first_warning_step=first.step if first else None,
        **{name: getattr(first, name, None) for name in _OF_THE_WARNING},
        warnings=len(raised),
        incidents=opened(verdicts),
        forecasts=forecasts_of(trace, verdicts),
        failing_head=failing_head(trace, None if harm is None else harm.step) if failed else None,
        told_in_time=incident_at(verdicts, int(harm.step - asked_lead(harm.step))) if harm else None,
        harm_limits=None if control is None else limits,
        first_steps=steps,
        signals=signals,
    )


_LOOKED_AT: Final = (("healthy-small-many-heads", None), ("shared-values", 1), ("paper-values", 1))
"""Recipes that were meant to be held out, and the seed (None: any) whose runs thresholds were changed after."""


def split(trace: Trace) -> str:
    """The set a run belongs to: as the split of the runs on real text says, or else its recipe, but tuning where
    thresholds were changed after a look at it."""
    recipe, seed = trace.header.get("recipe"), trace.header.get("seed")
    if (half := assigned(str(recipe), seed)) is not None:
        return half
    looked_at = any(recipe == name and number in (None, seed) for name, number in _LOOKED_AT)
    return "tuning" if looked_at else str(trace.header.get("split", "unassigned"))


def truth(trace: Trace) -> str:
    """What a run was made to show; a trace that does not say is healthy in float32 and rounding otherwise.

    A run of a failing recipe that was treated from the start (exact delta, say) is "treated": neither healthy nor a
    failure to warn of, since treatment may come short.
    """
    recorded, arm = trace.header.get("truth"), str(trace.header.get("arm", ""))
    if recorded is None:
        return "healthy" if not trace.rounds or arm == "control" else "rounding"
    treated = recorded == "healthy" and trace.rounds and arm not in ("untreated", "control")
    return "treated" if treated else str(recorded)


def _watched(trace: Trace, config: DetectorConfig) -> tuple[list[wire.Verdict], dict[str, Signal]]:
    """The verdicts in their order, notes left out, and how near a warning the run was by every detector: 1 warns."""
    detectors = Detectors(trace.heads, config)
    found: list[wire.Verdict] = []
    steps: list[int] = []
    ratios: list[Floats] = []
    for reading in readings(trace):
        reading = replace(reading, rounds=True)  # a control is judged as if something could happen to it
        found += [verdict for verdict in detectors.update(reading) if verdict.severity != "info"]
        steps.append(reading.step)
        ratios.append(detectors.warning_ratios.max(axis=1, initial=0.0))
    values = np.stack(ratios) if ratios else np.zeros((0, len(SIGNAL_NAMES)))
    step = np.array(steps, dtype=np.int64)
    named = {f"{OURS}: {name}": Signal(step, values[:, row]) for row, name in enumerate(SIGNAL_NAMES)}
    return found, {OURS: Signal(step, values.max(axis=1, initial=0.0)), **named}


def dangerous_step(trace: Trace, verdict: wire.Verdict | None = None) -> int | None:
    """When the largest |score| of the head that `verdict` names, or of any head, reached 512."""
    named = verdict is not None and verdict.layer is not None and verdict.head is not None
    rows = [trace.heads.index((verdict.layer, verdict.head))] if named else slice(None)  # type: ignore[union-attr,arg-type]
    for reading in readings(trace):
        if (reading.largest_score[rows] >= DANGEROUS_SCORE).any():
            return reading.step
    return None


def alarms(signal: Signal, threshold: float, spacing_steps: int = QUIET_STEPS) -> list[int]:
    """The steps of the alarms: where the signal is at the threshold, not again within `spacing_steps` of an alarm.

    A monitor that stays beyond its threshold alarms again and again; one that hovers about it is not counted for more.
    """
    with np.errstate(invalid="ignore"):
        beyond = signal.step[signal.value >= threshold]
    found: list[int] = []
    while len(beyond):
        found.append(int(beyond[0]))
        beyond = beyond[np.searchsorted(beyond, found[-1] + spacing_steps) :]
    return found


def _first(steps: Sequence[int]) -> int | None:
    return steps[0] if steps else None


def lead_before(heard: Sequence[int], step: int) -> int:
    """Steps from the first alarm to `step`; 0 for none, or one that came later."""
    return max(step - heard[0], 0) if heard else 0


def heard_of(score: Score, monitor: str, threshold: float) -> list[int]:
    """Ours, as shipped, is heard by its verdicts, which latch; any other by its crossings."""
    if monitor == OURS and threshold == 1.0:
        return [] if score.first_warning_step is None else [score.first_warning_step]
    return alarms(score.signals[monitor], threshold)


def score_traces(
    traces: Sequence[Trace],
    config: DetectorConfig | None = None,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> list[Score]:
    """Score traces beside their controls. `on_trace` hears of each one that is done."""
    controls = controls_of(traces)
    limits = limits_of_recipes(controls)
    scores = []
    for trace in traces:
        recipe, seed = trace.header.get("recipe"), trace.header.get("seed")
        own = [each for each in controls.get((recipe, seed), []) if each.header.get("arm") == CONTROL.name]
        control = None if not own or own[-1] is trace else own[-1]
        scores.append(_score(trace, config or DetectorConfig(), control, limits.get(str(recipe))))
        on_trace(trace)
    return scores
