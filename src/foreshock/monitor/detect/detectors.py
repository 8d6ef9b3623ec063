"""Early warning per head: what is measured, what trips, what is warned of. No clock, no I/O, no torch, no control run.

A head's scores may drift as a whole: softmax cannot see it, rounding can (paper, section 3.3). When a block of steps
closes, each head is compared with itself over the newer half of the past that is held, at most `window_steps`:

    a drift       |offset| >= 3 nats, 1.5 of them in this window, and the largest |score| moves along
    supported     bets that the delta bias pushes that way have won enough (bias_evidence.py); or |offset| >= 50 nats
    it matters    on this course the largest |score| is 512 within six windows
    it lasts      all of this in three blocks in a row
    or, whatever moves it, a largest |score| that is dangerous, or will be soon at the pace at which it grows

A verdict is latched until a head has been quiet for `quiet_steps`. run_state.py has what is remembered of the run,
rule.py the conditions as ratios, verdicts.py the sentence.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.causes import Cause
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, courses
from foreshock.monitor.detect.growth import SIGNAL_NAMES, HeadSignal
from foreshock.monitor.detect.non_finite import NON_FINITE, RUN
from foreshock.monitor.detect.readings import Readings as Readings
from foreshock.monitor.detect.rule import DetectorConfig as DetectorConfig
from foreshock.monitor.detect.rule import Flags, WarningConditions
from foreshock.monitor.detect.run_state import Alarm, RunState
from foreshock.monitor.detect.verdicts import Evidence, Finding, verdict, who

_MOST_RAISED: Final = 16
"""New verdicts of one sample."""


class Detectors:
    """Watches N heads online. `heads` names the (layer, head) of every row of the readings.

    `update` takes samples in the order of their steps.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], config: DetectorConfig | None = None) -> None:
        self.heads = list(heads)
        self.config = config or DetectorConfig()
        self.run = RunState.begin(self.heads, self.config)
        """What is remembered of the run so far."""
        self._conditions: WarningConditions | None = None
        """as of the last block; None while too few are held"""

    @property
    def warning_ratios(self) -> Floats:
        """How near a warning offset and score of each head are, [2, N], 0 or more; at 1 they warn."""
        ratios: Floats = self.run.warning_ratios.min(axis=0)
        return ratios

    @property
    def risk(self) -> Floats:
        """How near a warning each head is, [N] in [0, 1]; 1 while a verdict on it is active."""
        risk: Floats = np.clip(self.warning_ratios.max(axis=0), 0.0, 1.0)
        risk[[index for index in self.run.alarms if index != RUN]] = 1.0
        return risk

    @property
    def supported(self) -> Flags:
        """The heads whose delta bias supports their drift as of the last block, [N]."""
        none = np.zeros(len(self.heads), dtype=np.bool_)
        return none if self._conditions is None else self._conditions.supported

    @property
    def undecided(self) -> bool:
        """Whether closer samples would show the cause of a drift that matters, as of the last block."""
        return self._conditions is not None and bool(self._conditions.undecided.any())

    @property
    def active(self) -> list[wire.Verdict]:
        """The verdicts that are raised and not cleared."""
        return [alarm.verdict for alarm in self.run.alarms.values()]

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """Take in one sample, and return the verdicts that were raised, updated or cleared by it.

        A step that lies before the last one is a run set back to an older checkpoint: what came after it is forgotten,
        its verdicts stand. Raises ValueError when the readings are not of these heads.
        """
        if readings.score_offset.shape != (len(self.heads),):
            raise ValueError(f"readings of shape {readings.score_offset.shape} were given to {len(self.heads)} heads")
        if readings.step < self.run.last_step:
            self.run.set_back(readings.since_step)
            self._conditions = None
        if self._conditions is not None:  # the evidence of heads whose mode changes begins anew
            self._conditions.supported[self.run.modes != readings.modes] = False
        with np.errstate(divide="ignore", invalid="ignore"):  # what is unknown is NaN, and stays it
            broken = self.run.non_finite.update(readings, self.config.overflow_steps, self.heads)
            # One verdict on the run says where it began and how far it reaches. A head that is warned about breaks too.
            tripped = {index: NON_FINITE for index in broken if index == RUN or index in self.run.alarms}
            closed = self.run.add(readings)
            if closed:
                self._measure()
                tripped = self._trip() | tripped
            return self._report(tripped, readings.step, block_closed=closed)

    def _measure(self) -> None:
        run = self.run
        growth = run.past.growth(self.config.window_steps) if self.heads else None
        self._conditions = None
        if growth is not None:
            self._conditions = WarningConditions.of(growth, run.bias, run.can_round(), self.config)

    def _trip(self) -> dict[int, str]:
        """Compute the heads that trip now, with their signal."""
        ratios, conditions = self.run.warning_ratios, self._conditions
        if conditions is None:
            # A score that is dangerous before growth can be measured is no less dangerous.
            score = self.run.past.values[(self.run.past.closed - 1) % len(self.run.past.ends), HeadSignal.SCORE]
            ratios[:, HeadSignal.SCORE] = np.where(score >= DANGEROUS_SCORE, score / DANGEROUS_SCORE, 0.0)
        else:
            sparse = self.run.past.newest_steps >= self.config.persist_blocks * self.config.block_steps
            ratios[slice(None) if sparse else self.run.past.closed % len(ratios)] = conditions.ratios
            now = conditions.ratios[HeadSignal.SCORE, conditions.urgent]
            ratios[:, HeadSignal.SCORE, conditions.urgent] = np.maximum(
                ratios[:, HeadSignal.SCORE, conditions.urgent], now
            )
        lasting = self.warning_ratios >= 1.0
        heads = np.flatnonzero(lasting.any(axis=0))
        return {head: SIGNAL_NAMES[lasting[:, head].argmax()] for head in heads.tolist()}

    def _report(self, tripped: dict[int, str], step: int, *, block_closed: bool) -> list[wire.Verdict]:
        """Verdicts of a sample whose heads trip with these signals: what drifted farthest is raised or updated first,
        then what no longer trips and may have settled, then what is quiet is cleared."""
        alarms, due = self.run.alarms, step - self.config.update_steps
        settled: dict[int, str] = {}
        for index, alarm in alarms.items():
            last = alarm.verdict
            if index in tripped or (block_closed and self._shown(index).score >= DANGEROUS_SCORE):
                alarm.tripped_step = step
            if block_closed and index not in tripped and last.step <= due and last.signal != NON_FINITE:
                settled[index] = last.signal
        found = self._findings({**tripped, **settled}) if tripped or settled else {}
        far = {i: math.inf if i == RUN else max(0.0, abs(found[i].evidence.offset)) for i in tripped}  # NaN: 0
        verdicts: list[wire.Verdict] = []
        for index in sorted(found, key=lambda i: far.get(i, -1.0), reverse=True):
            one, before = found[index], alarms.get(index)
            if before is None:
                if len(verdicts) >= _MOST_RAISED:
                    continue
            else:  # people would do something else than after the verdict before
                broken = one.signal == NON_FINITE, before.verdict.signal == NON_FINITE
                changed = (one.severity, one.cause) != (before.verdict.severity, before.verdict.cause)
                placed = index == RUN and self.run.non_finite.placed
                if not (before.verdict.step <= due or changed or broken[0] != broken[1] or placed):
                    continue
            layer, head = self.heads[index] if index != RUN else (None, None)
            made = verdict(one, step=step, layer=layer, head=head, before=before.verdict if before else None)
            if index == RUN:
                said = self.run.non_finite.sentence(step, len(self.heads))
                made = made.model_copy(update={"sentence": said})
            elif before and before.tripped_step < step:
                since = f" No condition of a warning has been met since step {before.tripped_step:,}."
                made = made.model_copy(update={"sentence": made.sentence + since})
            verdicts.append(made)
            alarms[index] = Alarm(made, before.tripped_step if before else step)
        for index in [i for i, alarm in alarms.items() if alarm.tripped_step <= step - self.config.quiet_steps]:
            quiet = alarms.pop(index)
            since = f"met no condition of a warning for {step - quiet.tripped_step:,} steps"
            sentence = f"{who(quiet.verdict.layer, quiet.verdict.head)} has {since}."
            verdicts.append(quiet.verdict.model_copy(update={"step": step, "state": "cleared", "sentence": sentence}))
        return verdicts

    def _shown(self, index: int) -> Evidence:
        """What the last block shows of a head."""
        if self._conditions is None or index == RUN:
            return Evidence()
        growth, won = self._conditions.growth, self._conditions.evidence
        shown = [float(part[signal, index]) for signal in HeadSignal for part in (growth.end, growth.start)]
        return Evidence(*[*shown, growth.steps, float(won[index])])

    def _findings(self, signals: Mapping[int, str]) -> dict[int, Finding]:
        """What is found of each of these heads, and of the run.

        The cause is rounding where the delta bias supports the drift, and for as long as it does not speak against it;
        a head whose delta bias is no longer applied keeps its cause, since nothing can test it.
        """
        conditions, stand = self._conditions, {index: alarm.verdict for index, alarm in self.run.alarms.items()}
        heads = np.array([index for index in signals if index != RUN], dtype=np.int64)
        ahead: dict[int, float] = {}
        if conditions is not None:
            ahead = dict(zip(heads.tolist(), courses(conditions.growth, heads).tolist(), strict=True))
        # Scores that grow for another reason push the delta bias too.
        growing = any((each.severity, each.cause) == ("critical", "score growth") for each in stand.values())
        found = {}
        for index, signal in signals.items():
            before, evidence, course = stand.get(index), self._shown(index), ahead.get(index, math.nan)
            named = before is not None and before.cause == "rounding"
            supported = index != RUN and bool(self.supported[index])
            why: Cause = "score growth"
            grave = evidence.score >= DANGEROUS_SCORE
            if signal == NON_FINITE:
                known = before.evidence.get("suspect_step") if before else None
                suspected = self.run.non_finite.suspect_step or known
                evidence, course = evidence._replace(suspect_step=float(suspected or math.nan)), math.nan
                why = "rounding" if named or supported else "other"
                grave = grave or self.run.non_finite.harm == "weights"
            elif (named and (conditions is None or not conditions.refuted[index])) or (supported and not growing):
                grave, why = evidence.score >= self.config.growing_score, "rounding"
            found[index] = Finding(signal, evidence, why, "critical" if grave else "warning", course)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next sample depends on; JSON-able."""
        return self.run.saved()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another configuration, or by a
        version whose states have another layout; nothing of it is taken up then."""
        self.run = self.run.loaded(state)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._measure()
