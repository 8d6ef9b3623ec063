"""Early warning per head: what is measured, what trips, what is warned of. No clock, no I/O, no torch, no control run.

A head's scores may drift as a whole: softmax cannot see it, rounding can (paper, section 3.3). When a block of steps
closes, each head is compared with itself over the second half of the run so far, at most `window_steps`:

    1. it drifts    |offset| >= 3 nats, 1.5 of them in this window (in a young run 1 + |offset| also grew, up to 3-fold)
    2. rounding     the accumulated delta bias has the same sign, and the largest |score| moves along
    3. it matters   on this course the largest |score| is 512 within three times the run so far
    4. it lasts     all of this in three blocks in a row
    or, whatever moves it, scores that grow: a largest |score| of 256 for a drift, of 512 for a head that sharpens, with
    3 (a head that sharpens has to come to 1024) and 4

A verdict is latched until a head has been quiet for `quiet_steps`. run_state.py has what is remembered of the run,
rule.py the conditions 1 to 3 as ratios, verdicts.py cause and sentence, forecast.py the steps that are left.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, NEAR_RUN_MULTIPLE, courses, forecast
from foreshock.monitor.detect.growth import SIGNAL_NAMES, HeadSignal
from foreshock.monitor.detect.non_finite import NON_FINITE, RUN
from foreshock.monitor.detect.readings import Readings as Readings
from foreshock.monitor.detect.rule import WarningConditions
from foreshock.monitor.detect.run_state import Alarm, RunState
from foreshock.monitor.detect.thresholds import DetectorConfig as DetectorConfig
from foreshock.monitor.detect.verdicts import Evidence, Finding, cause, verdict, who

_MOST_RAISED: Final = 16
"""New verdicts of one sample."""


class Detectors:
    """Watches N heads online. `heads` names the (layer, head) of every row of the readings.

    `update` takes samples in the order of their steps.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], config: DetectorConfig | None = None) -> None:
        self.heads = list(heads)
        self.config = config or DetectorConfig()
        self._layers = np.array([layer for layer, _ in self.heads], dtype=np.int64)
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
    def active(self) -> list[wire.Verdict]:
        """The verdicts that are raised and not cleared."""
        return [alarm.verdict for alarm in self.run.alarms.values()]

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """Take in one sample, and return the verdicts that were raised, updated or cleared by it.

        A step that lies before the last one is a run set back to an older checkpoint: its past is forgotten, its
        verdicts stand. Raises ValueError when the readings are not of these heads.
        """
        if readings.score_offset.shape != (len(self.heads),):
            raise ValueError(f"readings of shape {readings.score_offset.shape} were given to {len(self.heads)} heads")
        if readings.step < self.run.last_step:
            self.run, self._conditions = self.run.set_back(self.config), None
        if self._conditions is not None:  # the delta bias of heads whose mode changes begins anew
            self._conditions.bias_supports_drift[self.run.modes != readings.modes] = False
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
        run, config, found = self.run, self.config, None
        growth = run.past.growth(min(run.past.last_step / 2, config.window_steps)) if self.heads else None
        if growth:
            past_warmup = run.past_warmup(config.earliest_steps)
            found = WarningConditions.of(growth, run.delta_bias_z, config, past_warmup=past_warmup)
        self._conditions = found

    def _trip(self) -> dict[int, str]:
        """Compute the heads that trip now, with their signal."""
        run, conditions = self.run, self._conditions
        if conditions is None:
            return {}
        run.warning_ratios[run.past.closed % len(run.warning_ratios)] = conditions.ratios
        lasting = self.warning_ratios >= 1.0
        heads = np.flatnonzero(lasting.any(axis=0))
        first = (SIGNAL_NAMES[signal] for signal in lasting.take(heads, axis=1).argmax(axis=0).tolist())
        tripped = dict(zip(heads.tolist(), first, strict=True))
        for layer in set(self._layers[heads].tolist()):  # old recordings hold one value for all heads of a layer
            members = np.flatnonzero(self._layers == layer).tolist()
            signal = next(tripped[index] for index in members if index in tripped)
            if len(members) > 1 and np.ptp(conditions.growth.end[SIGNAL_NAMES.index(signal), members]) == 0:
                tripped = {index: each for index, each in tripped.items() if index not in members}
                most_biased = max(members, key=lambda index: abs(run.bias_sum[index]))
                tripped[next((index for index in members if index in run.alarms), most_biased)] = signal
        return tripped

    def _report(self, tripped: dict[int, str], step: int, *, block_closed: bool) -> list[wire.Verdict]:
        """Verdicts of a sample whose heads trip with these signals: raised and updated ones, then what is quiet."""
        run, alarms, conditions = self.run, self.run.alarms, self._conditions
        dangerous = conditions.dangerous if conditions else ()
        if tripped or dangerous:
            for index in [index for index in alarms if index in tripped or index in dangerous]:  # it is not quiet then
                tripped.setdefault(index, alarms[index].verdict.signal)
                alarms[index].tripped_step = step
        verdicts: list[wire.Verdict] = []
        news = self._news(tripped, step, block_closed=block_closed) if tripped or (block_closed and alarms) else {}
        growing = [index for index, found in news.items() if found.signal != NON_FINITE and conditions]
        ahead = courses(conditions.growth, np.array(growing)).tolist() if growing and conditions else []
        steps = dict(zip(growing, ahead, strict=True))
        for index, found in news.items():
            far = found.supported and abs(found.evidence.offset) >= self.config.far_offset
            course = forecast(steps.get(index, math.nan), near_steps=NEAR_RUN_MULTIPLE * step if far else 0.0)
            layer, head = self.heads[index] if index != RUN else (None, None)
            before = alarms[index].verdict if index in alarms else None
            made = verdict(found, step=step, layer=layer, head=head, ahead=course, before=before)
            if index == RUN:
                made = made.model_copy(update={"sentence": run.non_finite.sentence(step, len(self.heads))[:500]})
            verdicts.append(made)
            alarms[index] = Alarm(verdicts[-1], alarms[index].tripped_step if before else step)
        for index in [i for i, alarm in alarms.items() if alarm.tripped_step <= step - self.config.quiet_steps]:
            quiet = alarms.pop(index)
            sentence = (
                f"{who(quiet.verdict.layer, quiet.verdict.head)} has been quiet for {step - quiet.tripped_step} steps."
            )
            verdicts.append(quiet.verdict.model_copy(update={"step": step, "state": "cleared", "sentence": sentence}))
        return verdicts

    def _news(self, tripped: Mapping[int, str], step: int, *, block_closed: bool) -> dict[int, Finding]:
        """Findings to report, by head: what drifted farthest first, then what no longer trips and may have settled."""
        run, config, due = self.run, self.config, step - self.config.update_steps
        stand = {index: alarm.verdict for index, alarm in run.alarms.items()}
        measured = block_closed and self._conditions is not None
        settled = [index for index, last in stand.items() if index not in tripped and last.step <= due and measured]
        signals = dict(tripped) | {i: stand[i].signal for i in settled if stand[i].signal != NON_FINITE}
        evidence, supported = self._evidence(list(signals)), self._supported(signals)
        far = {i: math.inf if i == RUN else max(0.0, abs(evidence[i].offset)) for i in tripped}  # NaN: 0
        conditions = self._conditions
        explained = {i for i in supported & tripped.keys() if conditions and conditions.bias_supports_drift[i]}
        can_round = run.past_warmup(config.earliest_steps) and not any(
            last.severity == "critical" and last.cause != "rounding" and last.signal != NON_FINITE
            for index, last in stand.items()
            if index not in explained
        )
        news: dict[int, Finding] = {}
        for index in sorted(signals, key=lambda i: far.get(i, -1.0), reverse=True):
            signal, seen, before = signals[index], evidence[index], stand.get(index)
            if before is None and len(news) >= _MOST_RAISED:
                continue
            drifts = index in supported
            why = cause(signal, seen.score_before, rounds=drifts and can_round, before=before.cause if before else None)
            broken = signal == NON_FINITE
            grave = (broken and run.non_finite.harm == "weights") or seen.score >= (
                config.score_level if drifts else DANGEROUS_SCORE
            )
            severity: wire.Severity = "critical" if grave else "warning"
            same = before and (severity, why, broken) == (before.severity, before.cause, before.signal == NON_FINITE)
            if before is not None and before.step > due and same:  # people would do nothing else than after that one
                continue
            if broken:
                suspected = run.non_finite.suspect_step or (before.evidence.get("suspect_step") if before else None)
                seen = seen._replace(suspect_step=float(suspected or math.nan))
            news[index] = Finding(signal, seen, drifts, why, severity)
            can_round &= not grave or drifts or why == "rounding" or broken
        return news

    def _supported(self, signals: Mapping[int, str]) -> set[int]:
        """Those of these heads whose delta bias supports their drift; an offset trips nowhere else."""
        if self._conditions is None:
            return set()
        supports, offset = self._conditions.bias_supports_drift, SIGNAL_NAMES[HeadSignal.OFFSET]
        rounding = (index for index in signals if index != RUN and self.run.can_round(index))
        return {index for index in rounding if signals[index] == offset or supports[index]}

    def _evidence(self, heads: list[int]) -> dict[int, Evidence]:
        """What verdicts show of these heads, by head; of the whole run nothing."""
        if self._conditions is None:
            return dict.fromkeys(heads, Evidence())
        growth, squares = self._conditions.growth, self.run.bias_squares.take(heads)
        shown = [part[signal].take(heads) for signal in HeadSignal for part in (growth.end, growth.start)]
        shown += [growth.error[HeadSignal.SCORE].take(heads), np.full(len(heads), growth.steps)]
        rows = zip(*map(np.ndarray.tolist, [*shown, self.run.bias_sum.take(heads) / np.sqrt(squares)]), strict=True)
        return dict(zip(heads, starmap(Evidence, rows), strict=True)) | ({RUN: Evidence()} if RUN in heads else {})

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next sample depends on; JSON-able."""
        return self.run.saved()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another configuration, or by a
        version whose states have another layout; nothing of it is taken up then."""
        self.run = self.run.loaded(state)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._measure()
