"""Early warning per head: trip heads, raise and update verdicts, and clear them. No clock, I/O, torch or control run.

docs/detectors.md explains the rule. rule.py computes its conditions as ratios, run_state.py stores the state of the
run, and verdicts.py writes the messages. A single sample is enough to detect nonfinite numbers (non_finite.py), wrong
rows, and scores that are larger than in any healthy run (levels.py).
"""

import math
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.causes import Cause
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import SIGNAL_NAMES, HeadSignal
from foreshock.monitor.detect.levels import FIRST_STEPS, passed_levels, wrong_rows
from foreshock.monitor.detect.non_finite import NON_FINITE, RUN
from foreshock.monitor.detect.readings import Readings as Readings
from foreshock.monitor.detect.rule import DetectorConfig as DetectorConfig
from foreshock.monitor.detect.rule import Flags, WarningConditions
from foreshock.monitor.detect.run_state import SAVED, Alarm, RunState
from foreshock.monitor.detect.verdicts import Finding, cleared, verdict

_MOST_RAISED: Final = 16
"""The maximum number of verdicts that one sample raises."""


class Detectors:
    """Watches N heads online. `heads`: the (layer, head) of every row of the readings. `head_dims`: the head dim of
    each layer for which it is known.

    `update` takes samples in the order of their steps.
    """

    def __init__(
        self,
        heads: Sequence[wire.HeadRef],
        config: DetectorConfig | None = None,
        head_dims: Mapping[int, int] | None = None,
    ) -> None:
        self.heads = list(heads)
        self.config = config or DetectorConfig()
        self._head_dims = head_dims or {}
        self.run = RunState.begin(self.heads, self.config)
        """The state of the run so far."""
        self._conditions = self._measured(self.run)
        """The conditions of warnings, as of the last block."""

    @property
    def warning_ratios(self) -> Floats:
        """How close offset and score of each head are to a warning, [2, N], from 0 up; at 1 they trigger it."""
        ratios: Floats = self.run.warning_ratios.min(axis=0)
        return ratios

    @property
    def risk(self) -> Floats:
        """How close each head is to a warning, [N] in [0, 1]; 1 while a verdict on it is active."""
        risk: Floats = np.clip(self.warning_ratios.max(axis=0), 0.0, 1.0)
        risk[[index for index in self.run.alarms if index != RUN]] = 1.0
        return risk

    @property
    def supported(self) -> Flags:
        """The heads whose delta bias supports their drift as of the last block, [N]."""
        return self._conditions.supported

    @property
    def undecided(self) -> bool:
        """Whether more frequent samples could show the cause of a relevant drift, as of the last block."""
        return self._conditions.undecided

    @property
    def active(self) -> list[wire.Verdict]:
        """The verdicts that are raised and not cleared."""
        return [alarm.verdict for alarm in (*self.run.levels.values(), *self.run.alarms.values())]

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """Add one sample, and return the verdicts that it raises, updates or clears.

        A step before the last one means that the run was set back to an older checkpoint. The state after that step is
        dropped, but verdicts remain. Raises ValueError if the readings do not have these heads.
        """
        run, step = self.run, readings.step
        if readings.score_offset.shape != (len(self.heads),):
            raise ValueError(f"readings of shape {readings.score_offset.shape} were given to {len(self.heads)} heads")
        if step < run.last_step:
            run.set_back(readings.since_step)
            self._conditions = self._measured(run)
        modes, warned_before = run.modes, set(run.alarms)
        with np.errstate(divide="ignore", invalid="ignore"):  # unknown values are NaN, and stay NaN
            broken = run.non_finite.update(readings, self.config.overflow_steps, self.heads)
            # One verdict on the run describes origin and extent. Heads that already have a verdict get an update too.
            tripped = {index: NON_FINITE for index in broken if index == RUN or index in run.alarms}
            closed = run.add(readings)
            if modes is not run.modes:
                self._conditions.supported[modes != run.modes] = False  # a new mode starts with no evidence
            if closed:
                self._conditions = self._measured(run)
                tripped = self._trip(closed) | tripped
            verdicts = self._report(tripped, step, block_closed=closed > 0) + self._cleared(run.alarms, step)
            levels = self._pass_levels(readings, warned_before & run.alarms.keys())
            return levels + self._cleared(run.levels, step) + verdicts

    def _measured(self, run: RunState) -> WarningConditions:
        growth = run.past.growth(self.config.window_steps, run.last_step)
        return WarningConditions.of(growth, run.bias, run.can_round(), self.config)

    def _trip(self, steps: int) -> dict[int, str]:
        """Return the heads that trip after a block of `steps` steps, with their signal."""
        ratios, conditions = self.run.warning_ratios, self._conditions
        sparse = steps >= self.config.persist_blocks * self.config.block_steps
        for older, newer in pairwise(ratios):
            older[:] = newer
        ratios[slice(None) if sparse else -1] = conditions.ratios
        for head in conditions.urgent.tolist():
            score = ratios[:, HeadSignal.SCORE, head]
            np.maximum(score, conditions.ratios[HeadSignal.SCORE, head], out=score)
        if not (heads := list(conditions.ahead)):  # the ratios of other heads are below 1
            return {}
        drifts, grows = ratios.take(heads, axis=2).min(axis=0) >= 1.0
        lasting = zip(heads, drifts, grows, strict=True)
        return {head: SIGNAL_NAMES[not drift] for head, drift, growth in lasting if drift or growth}

    def _report(self, tripped: dict[int, str], step: int, *, block_closed: bool) -> list[wire.Verdict]:
        """Return the verdicts of a sample whose heads trip with these signals: first those of heads that trip, the
        farthest drift first, then updates for heads that do not trip any more and may have settled."""
        if not (tripped or block_closed):
            return []
        alarms, due = self.run.alarms, step - self.config.update_steps
        signals = dict(tripped)
        for index, alarm in alarms.items():
            if index in tripped or (block_closed and index != RUN and self._conditions.dangerous(index)):
                alarm.tripped_step = step
            if block_closed and alarm.verdict.step <= due and alarm.verdict.signal != NON_FINITE:
                signals.setdefault(index, alarm.verdict.signal)
        # Scores that grow for another reason push the delta bias too.
        growing = any((a.verdict.severity, a.verdict.cause) == ("critical", "score growth") for a in alarms.values())
        offsets = np.abs(self._conditions.growth.end[HeadSignal.OFFSET])
        far = {index: math.inf if index == RUN else max(0.0, offsets[index]) for index in tripped}  # NaN: 0
        made: list[wire.Verdict] = []
        for index in sorted(signals, key=lambda index: far.get(index, -1.0), reverse=True):
            before = alarms.get(index)
            found = self._found(index, signals[index], before.verdict if before else None, growing=growing)
            if before is None:
                wanted = len(made) < _MOST_RAISED
            else:  # also if users should react differently than to the previous verdict
                placed = index == RUN and self.run.non_finite.placed
                wanted = before.verdict.step <= due or found.differs(before.verdict) or placed
            if wanted:
                made.append(self._verdict(index, found, step, before))
                alarms[index] = Alarm(made[-1], before.tripped_step if before else step)
        return made

    def _found(self, index: int, signal: str, before: wire.Verdict | None, *, growing: bool) -> Finding:
        """Return the finding for a head, or for the run.

        The cause is rounding if the delta bias supports the drift, and remains rounding until the delta bias refutes
        it. A head whose delta bias is no longer applied keeps its cause, because this cannot be tested any more.
        """
        conditions, of_head = self._conditions, index != RUN
        cause: Cause = "score growth"
        named = before is not None and before.cause == "rounding"
        supported = of_head and conditions.supported[index]
        grave = of_head and conditions.dangerous(index)
        if signal == NON_FINITE:
            cause = "rounding" if named or supported else "other"
            grave = grave or self.run.non_finite.harm == "weights"
        elif (named and not conditions.refutes(index)) or (supported and not growing):
            cause, grave = "rounding", conditions.growth.end[HeadSignal.SCORE, index] >= self.config.growing_score
        return Finding(signal, cause, "critical" if grave else "warning")

    def _verdict(self, index: int, found: Finding, step: int, before: Alarm | None) -> wire.Verdict:
        """Return the verdict for a finding, with its evidence."""
        growth, non_finite, of = self._conditions.growth, self.run.non_finite, None
        evidence, course, words = dict[str, float](), math.nan, ""
        if index != RUN:
            of, course = self.heads[index], self._conditions.course(index)
            if not math.isnan(growth.steps):
                for name, now, was in zip(SIGNAL_NAMES, growth.end[:, index], growth.start[:, index], strict=True):
                    evidence |= {name: float(now), f"{name}_before": float(was)}
                evidence |= {"window_steps": growth.steps, "bias_evidence": self._conditions.evidence(index)}
        if found.signal == NON_FINITE:
            known = before.verdict.evidence.get("suspect_step") if before else None
            evidence["suspect_step"] = float(non_finite.suspect_step or known or math.nan)
            course, words = math.nan, non_finite.sentence(step, len(self.heads)) if of is None else ""
        return verdict(found, evidence, course, step=step, of=of, before=before, words=words)

    def _pass_levels(self, readings: Readings, silent: Container[int] = ()) -> list[wire.Verdict]:
        """Return the warnings about wrong rows and levels that this sample raises."""
        run, step, words = self.run, readings.step, readings.words
        if words is None:
            return []
        if run.first_score is None:
            if not readings.rows.any():
                return []
            run.first_score, run.first_step = float(np.nan_to_num(readings.largest_score, posinf=0.0).max()), step
        first = run.first_score if step - run.first_step < FIRST_STEPS else math.inf
        found = wrong_rows(words, self.heads, step)
        latched = {name: alarm.verdict for name, alarm in run.levels.items()}
        found |= passed_levels(readings, words, self.heads, self._head_dims, silent, first, latched)
        made = [each for name, each in found.items() if name not in run.levels]
        for name, each in found.items():
            run.levels.setdefault(name, Alarm(each, step)).tripped_step = step
        return made

    def _cleared(self, alarms: dict[Any, Alarm], step: int) -> list[wire.Verdict]:
        """Remove the alarms that have ended, and return their cleared verdicts."""
        over = [key for key, alarm in alarms.items() if alarm.tripped_step <= step - self.config.quiet_steps]
        return [cleared(alarms.pop(key), step) for key in over]

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later verdicts depend on, in types that JSON supports."""
        return dict(SAVED.dump_python(self.run, mode="json"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Raises ValueError, without changing anything, if it was saved with other heads or
        another configuration, or by a version with another state layout."""
        run = self.run.loaded(state)
        self._conditions = self._measured(run)
        self.run = run
