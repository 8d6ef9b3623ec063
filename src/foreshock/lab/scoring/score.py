"""Scores detectors and baselines on recorded runs: who was warned about, when and why.

Every monitor is a signal that rises with the danger and a threshold. What it says of one run are alarms, at most one in
2000 steps for as long as the signal is at the threshold. The first alarm before the first harm (harm.py)
is the warning, and the steps between them its lead; alarms of healthy runs are false. Ours are the warnings of a
replay, by the shipped thresholds; a baseline has its published threshold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from foreshock.contract.slots import Floats
from foreshock.contract.wire import HeadRef
from foreshock.lab.recording.harm import first_harm
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.baselines import BASELINES, Signal
from foreshock.lab.training.recipes import RECIPES, assigned
from foreshock.lab.training.variant import CONTROL
from foreshock.monitor.detect.detectors import DetectorConfig
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE

OURS: Final = "foreshock"
ASKED_LEAD_STEPS: Final = 1000
"""A warning is in time this many steps before the first harm, or half of the run's steps before it if that is less."""
QUIET_STEPS: Final = DetectorConfig().quiet_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One trace as it was seen; None where no warning came or nothing happened."""

    file: str
    runs_of: str
    """the set: the folder of the trace"""
    recipe: str
    variant: str
    seed: int | None
    policy: str | None
    split: str
    """tuning, held-out or unassigned"""
    truth: str
    """what the run was made to show: healthy, rounding, score growth, other or treated"""
    nature: str
    """natural or injected"""
    rounds: bool
    """whether attention was computed in a type that rounds"""
    steps: int
    cut_short: bool
    """whether it ended before its recipe does"""
    harm_step: int | None
    harm_by: str | None
    harm_against: str | None
    dangerous_step: int | None
    """when the largest |score| of any head reached 512"""
    failing_head: HeadRef | None
    """the first head whose |score| reached 512; None also where several heads have that score"""
    first_warning_step: int | None
    layer: int | None
    head: int | None
    cause: str | None
    signal: str | None
    forecast_steps: float | None
    forecast_low_steps: float | None
    warnings: int
    """verdicts raised in all"""
    alarms: dict[str, list[int] | None]
    """of every monitor; None where the trace did not record what it reads"""

    @property
    def healthy(self) -> bool:
        """Made to be healthy, and it was: no harm, and no |score| that reached 512."""
        return self.truth == "healthy" and self.harm_step is None and self.dangerous_step is None

    @property
    def failing(self) -> bool:
        """Made to fail by rounding, with nothing injected."""
        return (self.truth, self.nature) == ("rounding", "natural")

    def in_time(self, monitor: str) -> bool:
        """Whether a harmed run was warned about early enough."""
        heard, harm = self.alarms[monitor], self.harm_step
        return bool(heard and harm and harm - heard[0] >= min(ASKED_LEAD_STEPS, harm / 2))


_OF_THE_WARNING: Final = (
    *("layer", "head", "cause", "signal"),
    *("forecast_steps", "forecast_low_steps"),
)


def score_traces(
    traces: Sequence[Trace],
    config: DetectorConfig | None = None,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> list[Score]:
    """Score traces beside their controls. `on_trace` hears of each one that is done."""
    controls = {_run(trace): trace for trace in traces if trace.header.get("arm") == CONTROL.name}
    scores = []
    for trace in traces:
        control = controls.get(_run(trace))
        scores.append(_score(trace, config or DetectorConfig(), None if control is trace else control))
        on_trace(trace)
    return scores


def _run(trace: Trace) -> tuple[Any, Any]:
    return trace.header.get("recipe"), trace.header.get("seed")


def _score(trace: Trace, config: DetectorConfig, control: Trace | None) -> Score:
    said = [each for each in verdicts(trace, config) if each.state == "raised" and each.severity != "info"]
    first = said[0] if said else None
    harm = first_harm(trace.steps, None if control is None else control.steps)
    heard: dict[str, list[int] | None] = {OURS: [verdict.step for verdict in said]}
    for baseline in BASELINES:
        signal = baseline.signal(trace)
        heard[baseline.name] = None if signal is None else alarms(signal, baseline.threshold)
    dangerous, failing = _first_dangerous(trace)
    header, steps = trace.header, trace.samples[-1].step
    recipe = RECIPES.get(str(header.get("recipe")))
    return Score(
        file=trace.path.name,
        runs_of=trace.path.parent.name,
        recipe=str(header.get("recipe", "")),
        variant=str(header.get("arm", "")),
        seed=header.get("seed"),
        policy=header.get("policy"),
        split=split(trace),
        truth=truth(trace),
        nature=str(header.get("nature", "natural")),
        rounds=trace.rounds,
        steps=steps,
        cut_short=recipe is not None and steps < recipe.steps,
        harm_step=harm.step if harm else None,
        harm_by=harm.by if harm else None,
        harm_against=harm.against if harm else None,
        dangerous_step=dangerous,
        failing_head=failing,
        first_warning_step=first.step if first else None,
        **{name: getattr(first, name, None) for name in _OF_THE_WARNING},
        warnings=len(said),
        alarms=heard,
    )


_LOOKED_AT: Final = (("healthy-small-many-heads", None), ("shared-values", 1), ("paper-values", 1))
"""Recipes that were meant to be held out, and the seed (None: any) whose runs thresholds were changed after."""


def split(trace: Trace) -> str:
    """Which half a run belongs to: as the split of the runs on real text says, or else its recipe, but tuning where
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
    recorded, variant = trace.header.get("truth"), str(trace.header.get("arm", ""))
    if recorded is None:
        return "healthy" if not trace.rounds or variant == "control" else "rounding"
    treated = recorded == "healthy" and trace.rounds and variant != "control" and not variant.endswith("untreated")
    return "treated" if treated else str(recorded)


def _first_dangerous(trace: Trace) -> tuple[int | None, HeadRef | None]:
    """When a |score| first reached 512, and whose; no head where several share the largest one."""
    for reading in readings(trace):
        scores: Floats = reading.largest_score
        if (scores >= DANGEROUS_SCORE).any():
            largest = np.flatnonzero(scores == np.nanmax(scores))
            return reading.step, trace.heads[largest[0]] if len(largest) == 1 else None
    return None, None


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
