"""Early warning per head: what is measured, what trips, what is said. No clock, no I/O, no torch, no control run.

A head's scores may drift as a whole: softmax cannot see it, rounding can (paper, section 3.3). When a block of steps
closes, each head is compared with itself over the second half of the run's life so far, at most `window_steps`:

    1. it drifts    |offset| >= 3 nats, 1.5 of them in this window (in a young run 1 + |offset| also grew, up to 3-fold)
    2. rounding     the accumulated delta bias pushes the same way, and the largest |score| moves along
    3. it matters   on this course the largest |score| is 512 within three lives of the run
    4. it lasts     all of this in three blocks in a row
    or, whatever moves it, scores that grow: a largest |score| of 256 for a drift, of 512 for a head that sharpens, with
    3 (a head that sharpens has to come to 1024) and 4

A verdict is latched until a head has been quiet for `quiet_steps`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from pydantic import BaseModel

from foreshock.contract import wire
from foreshock.contract.modes import ROUNDING_ENDS, SCORES_MOVED
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.broken import BROKEN, RUN, Broken
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, NEAR_LIVES, courses, forecast
from foreshock.monitor.detect.growth import SIGNAL_NAMES, Growth, HeadPasts, HeadSignal, load, saved
from foreshock.monitor.detect.readings import Readings as Readings
from foreshock.monitor.detect.readings import is_finite
from foreshock.monitor.detect.rule import nearness, pushed_heads
from foreshock.monitor.detect.thresholds import DetectorConfig as DetectorConfig
from foreshock.monitor.detect.verdicts import Found, cause, verdict, who

_MOST_RAISED: Final = 16
"""New verdicts of one sample: one NaN reaches every head of the model within a step."""
_ENDS: Final = int(ROUNDING_ENDS)
"""A flag beside a number of NumPy's takes some forty times as long."""


class Detecting(Protocol):
    """What the agent needs of its detectors; `Detectors` says what each does."""

    @property
    def risk(self) -> Floats: ...
    @property
    def active(self) -> list[wire.Verdict]: ...
    def update(self, readings: Readings) -> list[wire.Verdict]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Alarm(BaseModel):
    """A latched verdict, and what decides when it is told again or cleared."""

    verdict: wire.Verdict
    tripped_step: int


class Detectors:
    """Watches N heads online. `heads` names the (layer, head) of every row of the readings.

    `update` takes samples in the order of their steps.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], config: DetectorConfig | None = None) -> None:
        self.heads = list(heads)
        self.config = config or DetectorConfig()
        self.support = self.config.support_z(len(self.heads))
        """standard errors of its delta bias by which a drift is supported"""
        self._layers = np.array([layer for layer, _ in self.heads], dtype=np.int64)
        self._rounds = True
        self._alarms: dict[int, _Alarm] = {}
        self._rate = np.array([0.0, 0.0, np.nan, -1.0])
        """highest learning rate and the step at which it came; the step from which the run was watched; the last one"""
        self._modes = np.full(len(self.heads), -1, dtype=np.int32)
        self._forget()

    def _forget(self) -> None:
        count = len(self.heads)
        self._past = HeadPasts(count, self.config.window_steps, self.config.block_steps)
        self._recent = np.zeros((self.config.persist_blocks, len(HeadSignal), count))
        self.pressure: Floats = np.zeros((len(HeadSignal), count))
        """how near a warning offset and score of each head are, [2, N], 0 or more; at 1 they warn"""
        self._bias = np.zeros((3, count))
        """delta bias: sum over the closed blocks, sum of the squares of theirs, and sum over the open one"""
        self._loss = np.array([0.0, 0.0, np.nan, np.nan])
        """of the open block: sum and steps; mean of the last block, and of the lowest"""
        self._broken = Broken(self.config.overflow_steps)
        self._growth: Growth | None = None
        self._dangerous: set[int] = set()
        """heads above the dangerous score: none is quiet, whichever way it moves"""
        self._together = self._pushed = np.zeros(count, dtype=np.bool_)

    @property
    def risk(self) -> Floats:
        """How near a warning each head is, [N] in [0, 1]; 1 while a verdict on it is active."""
        risk: Floats = np.clip(self.pressure.max(axis=0), 0.0, 1.0)
        risk[[index for index in self._alarms if index != RUN]] = 1.0
        return risk

    @property
    def active(self) -> list[wire.Verdict]:
        """The verdicts that are raised and not cleared."""
        return [alarm.verdict for alarm in self._alarms.values()]

    @property
    def push(self) -> Floats:
        """The accumulated delta bias of every head in units of its standard error, [N]; 0 where it is not applied, NaN
        before a block of it was closed."""
        with np.errstate(divide="ignore", invalid="ignore"):
            push = self._bias[0] / np.sqrt(self._bias[1])
        return np.where(self._modes & _ENDS, 0.0, push) if self._rounds else np.zeros_like(push)

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """Judge one sample; the verdicts that were raised, updated or cleared by it.

        A step that lies before the last one is a run set back to an older checkpoint: its past is forgotten, its
        verdicts stand. Raises ValueError when the readings are not of these heads.
        """
        if readings.score_offset.shape != (len(self.heads),):
            raise ValueError(f"readings of shape {readings.score_offset.shape} were given to {len(self.heads)} heads")
        if readings.step < self._rate[3]:
            self._forget()
        self._rounds = readings.rounds
        self._follow_rate(readings)
        with np.errstate(divide="ignore", invalid="ignore"):  # what is unknown is NaN, and stays it
            broken = dict.fromkeys(self._broken.update(readings)[: _MOST_RAISED + 1], BROKEN)
            closed = self._add(readings)
            tripped = self._judge() | broken if closed else broken
            return self._tell(tripped, readings.step, judged=closed)

    def _follow_rate(self, readings: Readings) -> None:
        """A run that was set back has its peak yet to come."""
        if math.isnan(self._rate[2]):
            self._rate[2] = readings.since_step
        if self._rate[1] > readings.step:
            self._rate[:2] = 0.0
        if readings.learning_rate is not None and readings.learning_rate > self._rate[0]:
            self._rate[:2] = readings.learning_rate, readings.step
        self._rate[3] = readings.step

    @property
    def _is_ripe(self) -> bool:
        """Growth is judged after twice the time in which the learning rate was seen to rise."""
        _, peak, began, step = self._rate.tolist()
        return bool(step >= max(self.config.earliest_steps, peak + max(peak - began, 0.0)))

    def _add(self, readings: Readings) -> bool:
        """Add a sample to the open block; whether that closes it."""
        offset, score, draw, loss = (
            readings.score_offset,
            readings.largest_score,
            readings.delta_bias_sum,
            readings.loss,
        )
        changed = self._modes != readings.modes
        if np.count_nonzero(changed):  # these begin anew, and this sample may hold scores of both kinds
            anew = (self._modes >= 0) & ((self._modes ^ readings.modes) & int(SCORES_MOVED) != 0)
            self._past.restart(anew)
            offset, score = np.where(anew, np.nan, offset), np.where(anew, np.nan, score)
            self._bias[:, changed], self._pushed[changed] = 0.0, False
            self._modes = readings.modes.astype(np.int32)
        total, squares, open_ = self._bias
        open_ += draw if is_finite(draw) else np.where(np.isfinite(draw), draw, 0.0)
        if loss is not None and math.isfinite(loss):
            steps = max(readings.step - readings.since_step, 1)
            self._loss[:2] += loss * steps, steps
        rate = readings.learning_rate
        if not self._past.add(readings.step, readings.since_step, readings.rows, offset, score, rate):
            return False
        # A block counts as one draw: rows of one step are not independent, and more samples are no more evidence.
        total += open_
        squares += open_ * open_
        open_[:] = 0.0
        if self._loss[1]:
            mean = self._loss[0] / self._loss[1]
            self._loss[:] = 0.0, 0.0, mean, np.fmin(self._loss[3], mean)
        return True

    def _judge(self) -> dict[int, str]:
        """The heads that trip now, with their signal."""
        self._measure()
        if (growth := self._growth) is None:
            return {}
        near = nearness(growth, self._together, self._pushed, ripe=self._is_ripe, config=self.config)
        self._recent[self._past.closed % len(self._recent)] = near
        self.pressure = self._recent.min(axis=0)
        lasting = self.pressure >= 1.0
        heads = np.flatnonzero(lasting.any(axis=0)).tolist()
        tripped = {index: SIGNAL_NAMES[lasting[:, index].argmax()] for index in heads}
        for layer in set(self._layers[heads].tolist()):  # old recordings hold one value for all heads of a layer
            members = np.flatnonzero(self._layers == layer)
            here = [index for index in members.tolist() if index in tripped]
            if len(members) > 1 and not np.ptp(growth.end[SIGNAL_NAMES.index(tripped[here[0]]), members]) > 0:
                warned = [index for index in members.tolist() if index in self._alarms]
                named = warned[0] if warned else int(members[np.argmax(np.abs(self._bias[0, members]))])
                [signal, *_] = [tripped.pop(index) for index in here]
                tripped[named] = signal
        return tripped

    def _measure(self) -> None:
        self._growth = self._past.growth(min(self._past.last_step / 2, self.config.window_steps))
        self._dangerous.clear()
        if self._growth is not None:
            self._together, self._pushed = pushed_heads(self._growth, self.push, self.support, self.config)
            self._dangerous |= set(np.flatnonzero(self._growth.end[HeadSignal.SCORE] >= DANGEROUS_SCORE).tolist())

    def _tell(self, tripped: dict[int, str], step: int, *, judged: bool) -> list[wire.Verdict]:
        if not (tripped or self._alarms):
            return []
        for index in (self._dangerous & self._alarms.keys()) - tripped.keys():
            tripped[index] = self._alarms[index].verdict.signal
        told = self._verdicts(self._news(tripped, step, judged=judged), step) if tripped or judged else []
        for index in [i for i, alarm in self._alarms.items() if alarm.tripped_step <= step - self.config.quiet_steps]:
            quiet = self._alarms.pop(index)
            says = f"{who(quiet.verdict)} has been quiet for {step - quiet.tripped_step} steps."
            told.append(quiet.verdict.model_copy(update={"step": step, "state": "cleared", "sentence": says}))
        return told

    def _news(self, tripped: Mapping[int, str], step: int, *, judged: bool) -> dict[int, Found]:
        """What is to be told, by head: what drifted farthest first, then what no longer trips and may have settled."""
        old = step - self.config.update_steps
        far = [0.0] * len(self.heads) if self._growth is None else np.abs(self._growth.end[HeadSignal.OFFSET]).tolist()
        order = {i: math.inf if i == RUN else 0.0 if math.isnan(far[i]) else far[i] for i in tripped}
        trips = sorted(tripped.items(), key=lambda trip: order[trip[0]], reverse=True)
        for index in tripped.keys() & self._alarms.keys():
            self._alarms[index].tripped_step = step
        if judged:
            standing = {i: alarm.verdict for i, alarm in self._alarms.items() if i not in tripped}
            trips += [(i, told.signal) for i, told in standing.items() if told.signal != BROKEN and told.step <= old]
        evidence = self._evidence([index for index, _ in trips])
        first: wire.Cause | None = None
        dangerous = False
        news: dict[int, Found] = {}

        def weigh(told: wire.Verdict | Found, *, explained: bool) -> None:
            """What stands of growth that is not shown to be rounding: the cause of the oldest such warning, and whether
            one is critical that no delta bias supports by now."""
            nonlocal first, dangerous
            if told.cause != "rounding" and told.signal != BROKEN:
                first = first or told.cause
                dangerous = dangerous or (told.severity == "critical" and not explained)

        for index, alarm in self._alarms.items():
            weigh(alarm.verdict, explained=index in tripped and self._is_supported(index))
        for index, signal in trips:
            before = self._alarms[index].verdict if index in self._alarms else None
            if before is None and len(news) >= _MOST_RAISED:
                continue
            found = self._look(index, signal, evidence[index], before, first, shown=self._is_ripe and not dangerous)
            if before is None or before.step <= old or found.is_news_after(before):
                news[index] = found
                weigh(found, explained=found.supported)
        return news

    def _look(
        self,
        index: int,
        signal: str,
        seen: dict[str, float],
        before: wire.Verdict | None,
        first: wire.Cause | None,
        *,
        shown: bool,
    ) -> Found:
        """What the evidence of a head comes to. It is critical where numbers are not finite, harm comes by a cause that
        is supported, or the score is dangerous already."""
        last, lowest = self._loss[2:].tolist()
        supported = self._is_supported(index, signal)
        why = cause(
            signal,
            seen,
            supported=supported,
            can_round=shown,
            left_track=last - lowest > self.config.unrest * abs(lowest),
            before=before.cause if before else None,
            first=first,
        )
        if signal == BROKEN:
            stood = math.nan if before is None else before.evidence.get("suspect_step", math.nan)
            suspected = stood if math.isnan(self._broken.since[2]) else float(self._broken.since[2])
            seen |= {} if math.isnan(suspected) else {"suspect_step": suspected}
        critical = self.config.score_level if supported else DANGEROUS_SCORE
        grave = signal == BROKEN or seen.get("score", 0.0) >= critical
        return Found(signal, seen, supported, why, "critical" if grave else "warning")

    def _is_supported(self, index: int, signal: str | None = None) -> bool:
        """Whether the delta bias of a head supports its drift; an offset trips nowhere else."""
        can_round = index != RUN and self._rounds and not self._modes[index] & _ENDS
        return can_round and (signal == SIGNAL_NAMES[HeadSignal.OFFSET] or bool(self._pushed[index]))

    def _verdicts(self, news: Mapping[int, Found], step: int) -> list[wire.Verdict]:
        """What is told of heads of which there is news; it stands from now on."""
        grown = [index for index, found in news.items() if found.signal != BROKEN]
        ahead: dict[int, float] = {}
        if grown and self._growth is not None:
            ahead = dict(zip(grown, courses(self._growth, np.array(grown)).tolist(), strict=True))
        told = []
        for index, found in news.items():
            layer, head = self.heads[index] if index != RUN else (None, None)
            far = found.supported and abs(found.seen.get("offset", 0.0)) >= self.config.far_offset
            course = forecast(ahead.get(index, math.nan), near_steps=NEAR_LIVES * step if far else 0.0)
            alarm = self._alarms.get(index)
            before = alarm.verdict if alarm else None
            told.append(verdict(found, step=step, layer=layer, head=head, ahead=course, before=before))
            self._alarms[index] = _Alarm(verdict=told[-1], tripped_step=alarm.tripped_step if alarm else step)
        return told

    def _evidence(self, indices: Iterable[int]) -> dict[int, dict[str, float]]:
        """What a verdict shows of each of these heads; of the whole run nothing."""
        found = {index: dict[str, float]() for index in indices}
        heads = [index for index in found if index != RUN]
        if self._growth is not None and heads:
            bias = {"delta_bias_z": self._bias[0, heads] / np.sqrt(self._bias[1, heads])}
            for name, values in (self._growth.evidence(heads) | bias).items():
                for index, value in zip(heads, values.tolist(), strict=True):
                    if math.isfinite(value):
                        found[index][name] = value
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next sample depends on; JSON-able."""
        return {
            "heads": [list(head) for head in self.heads],
            "alarms": {str(index): alarm.model_dump(mode="json") for index, alarm in self._alarms.items()},
            "past": self._past.state_dict(),
            "broken": saved(self._broken, ["since"]),
            **saved(self, self._ARRAYS),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another configuration."""
        if [tuple(head) for head in state["heads"]] != self.heads:
            raise ValueError(
                f"the saved detectors watched {len(state['heads'])} heads, this run has {len(self.heads)} or others; "
                "resume with the same model"
            )
        self._past.load_state_dict(state["past"])
        load(self._broken, ["since"], state["broken"])
        load(self, self._ARRAYS, state)
        self._alarms = {int(index): _Alarm.model_validate(alarm) for index, alarm in state["alarms"].items()}
        self.pressure = self._recent.min(axis=0)
        self._measure()

    _ARRAYS = ("_recent", "_bias", "_rate", "_loss", "_modes")
