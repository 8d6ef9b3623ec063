"""Early warning per head: what is measured, what trips, what is said. No clock, no I/O, no torch, no control run.

A head's scores may drift as a whole: softmax cannot see it, rounding can (paper, section 3.3).
Healthy heads move as far early in training, but they slow down with the age of the run, and a failing head does not.
So each signal is compared over the second half of the run's life so far (at most `window_steps`) with the head's own
past, with whether the growth goes on in the newer half of that window, and with its peers. The accumulated delta bias
names the cause and never warns: a drift the way that it pushes is believed early, any other only when it is large.
A verdict is latched until a head has been quiet for `quiet_steps`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from foreshock.contract import wire
from foreshock.contract.modes import ROUNDING_ENDS, SCORES_MOVED
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.broken import RUN, SIGNAL, Broken
from foreshock.monitor.detect.conditions import Nearness, any_at_least
from foreshock.monitor.detect.detecting import Detecting as Detecting
from foreshock.monitor.detect.forecast import NEAR_LIVES, courses, forecast, who
from foreshock.monitor.detect.growth import Growth, HeadPasts, array
from foreshock.monitor.detect.readings import Readings as Readings
from foreshock.monitor.detect.readings import is_finite
from foreshock.monitor.detect.signals import (
    DANGEROUS_SCORE,
    SIGNAL_NAMES,
    SIGNALS,
    HeadSignal,
    by_name,
)
from foreshock.monitor.detect.thresholds import DetectorConfig as DetectorConfig
from foreshock.monitor.detect.verdicts import Found, Otherwise, cause, severity, supported, verdict


class _Alarm(BaseModel):
    """A latched verdict, and what decides when it is told again or cleared."""

    verdict: wire.Verdict
    tripped_step: int


_ENDS: Final = int(ROUNDING_ENDS)
"""A flag beside a number of NumPy's takes some forty times as long."""
_PUSHED: Final = HeadSignal.OFFSET.name.lower()
_ONE_FOR_A_LAYER: Final = {signal.name.lower(): signal for signal, info in SIGNALS.items() if info.one_for_a_layer}
_MOST_RAISED: Final = 16
"""New verdicts of one sample: one NaN reaches every head of the model within a step."""


class Detectors:
    """Watches N heads online. `heads` names the (layer, head) of every row of the readings.

    `update` takes samples in the order of their steps. Vectorised over heads: a sample costs a few dozen operations on
    arrays [N], a closed block a few hundred.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], config: DetectorConfig | None = None) -> None:
        self.heads = list(heads)
        self.config = config or DetectorConfig()
        self._layers = np.array([layer for layer, _ in self.heads], dtype=np.int64)
        self._near = Nearness([layer for layer, _ in self.heads], self.config)
        self._step = -1
        self._rounds = True
        self._alarms: dict[int, _Alarm] = {}
        self._rate = np.array([0.0, 0.0, np.nan])
        """highest learning rate and the step at which it came; the step from which the run was watched"""
        self._modes = np.full(len(self.heads), -1, dtype=np.int32)
        self._forget()

    def _forget(self) -> None:
        count = len(self.heads)
        self._history = HeadPasts(count, self.config.window_steps, self.config.block_steps)
        self._recent = np.zeros((self.config.persist_blocks, len(SIGNALS), count))
        self._pressure = np.zeros((len(SIGNALS), count))
        self._bias = np.zeros((3, count))
        """delta bias: sum over the closed blocks, sum of the squares of theirs, and sum over the open one"""
        self._loss = np.array([0.0, 0.0, np.nan, np.nan])
        """of the open block: sum and steps; mean of the last block, and of the lowest"""
        self._broken = Broken(self.config.overflow_steps)
        self._growth: Growth | None = None
        self._dangerous: frozenset[int] = frozenset()
        """heads above the dangerous score: none is quiet, whichever way it moves"""

    @property
    def pressure(self) -> Floats:
        """How near a warning each signal of each head is, [len(SIGNALS), N], 0 or more; at 1 it warns."""
        return self._pressure

    @property
    def risk(self) -> Floats:
        """How near a warning each head is, [N] in [0, 1]; 1 while a verdict on it is active."""
        risk: Floats = np.clip(self._pressure.max(axis=0), 0.0, 1.0)
        risk[[index for index in self._alarms if index != RUN]] = 1.0
        return risk

    @property
    def active(self) -> list[wire.Verdict]:
        """The verdicts that are raised and not cleared."""
        return [alarm.verdict for alarm in self._alarms.values()]

    def update(self, readings: Readings) -> list[wire.Verdict]:
        """Judge one sample; the verdicts that were raised, updated or cleared by it.

        A step that lies before the last one is a run set back to an older checkpoint: its past is forgotten, its
        verdicts stand. Raises ValueError when the readings are not of these heads.
        """
        if readings.score_offset.shape != (len(self.heads),):
            raise ValueError(f"readings of shape {readings.score_offset.shape} were given to {len(self.heads)} heads")
        if readings.step < self._step:
            self._forget()
        self._step, self._rounds = readings.step, readings.rounds
        self._follow_rate(readings)
        with np.errstate(divide="ignore", invalid="ignore"):  # what is unknown is NaN, and stays it
            changed = self._modes != readings.modes
            any_changed = np.count_nonzero(changed) > 0
            anew = self._measured_anew(readings) if any_changed else changed
            self._weigh_bias(readings, changed if any_changed else None)
            values = [info.read(readings) for info in SIGNALS.values()]
            whole = readings.whole
            if any_changed and anew.any():  # this sample may hold scores of both kinds
                whole = False
                self._history.restart(anew)
                values = [
                    np.where(anew, np.nan, value) if value is not None and info.of_scores else value
                    for value, info in zip(values, SIGNALS.values(), strict=True)
                ]
            tripped = self._broken.update(readings, whole, most=_MOST_RAISED)
            if judged := self._add(readings, values, whole):
                self._close_loss()
                self._close_bias()
                self._measure()
                if self._growth is not None:
                    tripped = {**self._judge(self._growth, readings.step), **tripped}
            return self._tell(tripped, readings.step, judged=judged)

    def _follow_rate(self, readings: Readings) -> None:
        """A run that was set back has its peak yet to come."""
        if math.isnan(self._rate[2]):
            self._rate[2] = readings.since_step
        if self._rate[1] > readings.step:
            self._rate[:2] = 0.0
        if readings.learning_rate is not None and readings.learning_rate > self._rate[0]:
            self._rate[:2] = readings.learning_rate, readings.step

    def _ripe_from(self) -> float:
        """The step from which growth is judged: after twice the time in which the learning rate was seen to rise."""
        peak, began = float(self._rate[1]), float(self._rate[2])
        return max(self.config.earliest_steps, peak + max(peak - began, 0.0))

    def _measured_anew(self, readings: Readings) -> npt.NDArray[np.bool_]:
        """The heads [N] whose statistics speak of other scores than before: a mode that moves them went on or off."""
        moved: npt.NDArray[np.bool_] = (self._modes ^ readings.modes) & SCORES_MOVED != 0
        return (self._modes >= 0) & moved

    def _weigh_bias(self, readings: Readings, changed: npt.NDArray[np.bool_] | None) -> None:
        """Sum delta_lp - delta_hp of the open block. changed [N]: heads that got another mode and begin anew."""
        if changed is not None:
            self._bias[:, changed] = 0.0
            self._modes = readings.modes.astype(np.int32)
        draw = readings.delta_bias_sum
        if not is_finite(draw):
            draw = np.where(np.isfinite(draw), draw, 0.0)
        open_ = self._bias[2]  # a view: `self._bias[2] += draw` would copy the row onto itself as well
        open_ += draw

    def _close_bias(self) -> None:
        """A block counts as one draw, also one that a switch left a part of: rows of one step are not independent, and
        more samples of a block are no more evidence."""
        total, squares, open_ = self._bias
        total += open_
        open_ *= open_
        squares += open_
        open_[:] = 0.0

    def _add(self, readings: Readings, values: list[Floats | None], whole: bool) -> bool:
        rows = readings.rows
        if not whole:
            values = [None if each is None else np.where(np.isfinite(each), each, np.nan) for each in values]
            rows = np.where(np.isfinite(rows), np.maximum(rows, 0.0), 1.0)
        if readings.loss is not None and math.isfinite(readings.loss):
            steps = max(readings.step - readings.since_step, 1)
            self._loss[:2] += readings.loss * steps, steps
        rate = readings.learning_rate
        return self._history.add(readings.step, readings.since_step, rows, values, whole=whole, learning_rate=rate)

    def _close_loss(self) -> None:
        total, steps, last, lowest = self._loss
        if steps:
            last = total / steps
            lowest = np.fmin(lowest, last)
        self._loss[:] = 0.0, 0.0, last, lowest

    def _measure(self) -> None:
        """Growth over the second half of the run's life so far."""
        growth = self._growth = self._history.growth(min(self._history.last_step / 2, self.config.window_steps))
        self._dangerous = frozenset()
        if growth is not None and any_at_least(scores := growth.end[HeadSignal.SCORE], DANGEROUS_SCORE):
            self._dangerous = frozenset(np.flatnonzero(scores >= DANGEROUS_SCORE).tolist())

    def _judge(self, growth: Growth, step: int) -> dict[int, str]:
        """The heads that trip now, with their signal."""
        near = self._recent[self._history.closed % len(self._recent)]
        self._near(growth, step=step, ripe=step >= self._ripe_from(), push=self.push, out=near)
        np.minimum(self._recent[0], self._recent[-1], out=self._pressure)
        for between in self._recent[1:-1]:
            np.minimum(self._pressure, between, out=self._pressure)
        if not any_at_least(self._pressure, 1.0):
            return {}
        lasting = self._pressure >= 1.0
        heads = np.flatnonzero(lasting.any(axis=0))
        signals = lasting[:, heads].argmax(axis=0).tolist()
        tripped = {index: SIGNAL_NAMES[signal] for index, signal in zip(heads.tolist(), signals, strict=True)}
        return self._name_heads(tripped, growth)

    @property
    def push(self) -> Floats:
        """The accumulated delta bias of every head in units of its standard error, [N]; 0 where it is not applied or
        nothing was sampled, NaN before a block of it was closed."""
        if not self._rounds:
            return np.zeros(len(self.heads))
        with np.errstate(divide="ignore", invalid="ignore"):
            push: Floats = self._bias[0] / np.sqrt(self._bias[1])
        if np.count_nonzero(self._modes):
            push[self._modes & _ENDS != 0] = 0.0
        return push

    def _name_heads(self, tripped: dict[int, str], growth: Growth) -> dict[int, str]:
        """Where a whole layer shares one value, the trip is given to the head with the largest summed delta bias."""
        kept = dict(tripped)
        for layer in set(self._layers[list(tripped)].tolist()):
            members = np.flatnonzero(self._layers == layer)
            here = [index for index in members.tolist() if tripped.get(index) in _ONE_FOR_A_LAYER]
            if not here or len(members) < 2 or np.ptp(growth.end[_ONE_FOR_A_LAYER[tripped[here[0]]], members]) > 0:
                continue
            active = [index for index in members.tolist() if index in self._alarms]
            named = active[0] if active else int(members[np.argmax(np.abs(self._bias[0, members]))])
            signal = tripped[here[0]]
            for index in here:
                del kept[index]
            kept[named] = signal
        return kept

    def _tell(self, tripped: dict[int, str], step: int, *, judged: bool) -> list[wire.Verdict]:
        if not (tripped or self._alarms):
            return []
        standing = {i: self._alarms[i].verdict.signal for i in self._alarms if i in self._dangerous}
        tripped = tripped | {i: signal for i, signal in standing.items() if i not in tripped}
        news = self._news(tripped, step, judged=judged) if tripped or judged else {}
        told = self._verdicts(news, step)
        for index, made in zip(news, told, strict=True):
            tripped_step = step if index in tripped else self._alarms[index].tripped_step
            self._alarms[index] = _Alarm(verdict=made, tripped_step=tripped_step)
        long_ago = step - self.config.quiet_steps
        for index in [index for index, alarm in self._alarms.items() if alarm.tripped_step <= long_ago]:
            quiet = self._alarms.pop(index)
            says = f"{who(quiet.verdict)} has been quiet for {step - quiet.tripped_step} steps."
            told.append(quiet.verdict.model_copy(update={"step": step, "state": "cleared", "sentence": says}))
        return told

    def _news(self, tripped: Mapping[int, str], step: int, *, judged: bool) -> dict[int, Found]:
        """What is to be told, by head, in this order."""
        old = step - self.config.update_steps
        others = Otherwise()
        evidence = self._evidence(list(tripped))
        for index, active in self._alarms.items():
            explained = index in evidence and self._pushed(index, evidence[index])
            others = others.after(active.verdict, explained=explained)
        news: dict[int, Found] = {}
        for index, signal in sorted(tripped.items(), key=self._drifted, reverse=True):
            alarm = self._alarms.get(index)
            if alarm is None and len(news) >= _MOST_RAISED:
                continue
            seen = evidence[index]
            if signal == SIGNAL:
                seen |= self._broken.evidence(alarm.verdict if alarm else None)
            found = self._look(index, signal, seen, step, others)
            if alarm is not None:
                alarm.tripped_step = step
                if alarm.verdict.step > old and not found.is_news_after(alarm.verdict):
                    continue
            news[index] = found
            others = others.after(found, explained=found.supported)
        if judged:  # what no longer triggers may have settled
            still = {i: alarm.verdict for i, alarm in self._alarms.items() if alarm.tripped_step < step}
            still = {i: told for i, told in still.items() if told.signal != SIGNAL and told.step <= old}
            evidence = self._evidence(list(still))
            news |= {i: self._look(i, told.signal, evidence[i], step, others) for i, told in still.items()}
        return news

    def _look(self, index: int, signal: str, seen: dict[str, float], step: int, others: Otherwise) -> Found:
        """What the evidence of a head comes to."""
        is_shown = step >= self._ripe_from() and not others.dangerous
        # Of heads that share one value the offset of another may have triggered, which its bias supports.
        pushed = self._can_round(index) if signal == _PUSHED else self._pushed(index, seen)
        last, lowest = self._loss[2:].tolist()
        standing = self._alarms.get(index)
        why = cause(
            signal,
            seen,
            supported=pushed,
            can_round=self._can_round(index) and is_shown,
            left_track=last - lowest > self.config.unrest * abs(lowest),
            least_change=self.config.offset_change,
            before=standing.verdict.cause if standing else None,
            first=others.first,
        )
        return Found(signal, seen, pushed, why, severity(signal, seen, supported=pushed, config=self.config))

    def _can_round(self, index: int) -> bool:
        return self._rounds and index != RUN and not self._modes[index] & _ENDS

    def _pushed(self, index: int, seen: dict[str, float]) -> bool:
        """Whether the delta bias of a head supports its drift."""
        return self._can_round(index) and supported(seen, self._near.support, self.config.shared_part)

    def _verdicts(self, news: Mapping[int, Found], step: int) -> list[wire.Verdict]:
        """What is told of heads of which there is news."""
        grown = [index for index, found in news.items() if found.signal != SIGNAL]
        ahead: dict[int, float] = {}
        if grown and self._growth is not None:
            ahead = dict(zip(grown, courses(self._growth, np.array(grown)).tolist(), strict=True))
        told = []
        for index, found in news.items():
            layer, head = self.heads[index] if index != RUN else (None, None)
            far = found.supported and abs(found.seen.get("offset", 0.0)) >= self.config.far_offset
            course = forecast(ahead.get(index, math.nan), near_steps=NEAR_LIVES * step if far else 0.0)
            standing = self._alarms.get(index)
            before = standing.verdict if standing else None
            told.append(verdict(found, step=step, layer=layer, head=head, ahead=course, before=before))
        return told

    def _drifted(self, trip: tuple[int, str]) -> float:
        """How far a tripped head's offset has gone, so that the head that drifted farthest is told first."""
        if trip[0] == RUN or self._growth is None:
            return math.inf
        drift = abs(float(self._growth.end[HeadSignal.OFFSET, trip[0]]))
        return 0.0 if math.isnan(drift) else drift

    def _evidence(self, indices: list[int]) -> dict[int, dict[str, float]]:
        """What a verdict shows of each of these heads; of the whole run nothing."""
        growth, found = self._growth, {index: dict[str, float]() for index in indices}
        heads = [index for index in indices if index != RUN]
        if growth is None or not heads:
            return found
        bias = self._bias[:, heads]
        pushed = {"delta_bias_z": bias[0] / np.sqrt(bias[1])}
        for name, values in (growth.evidence(heads) | pushed).items():
            for index, value in zip(heads, values.tolist(), strict=True):
                if math.isfinite(value):
                    found[index][name] = value
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next sample depends on; JSON-able."""
        return {
            "heads": [list(head) for head in self.heads],
            "step": self._step,
            "alarms": {str(index): alarm.model_dump(mode="json") for index, alarm in self._alarms.items()},
            "signals": list(SIGNAL_NAMES),
            "history": self._history.state_dict(),
            "broken": self._broken.state_dict(),
            **{name: wire.Array.of(getattr(self, name)).model_dump() for name in self._ARRAYS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another configuration."""
        if [tuple(head) for head in state["heads"]] != self.heads:
            raise ValueError(
                f"the saved detectors watched {len(state['heads'])} heads, this run has {len(self.heads)} or others; "
                "resume with the same model"
            )
        self._history.load_state_dict(state["history"])
        self._broken.load_state_dict(state)
        for name in self._ARRAYS:
            if name not in state:  # saved by an older version
                continue
            saved = array(state[name])
            if name == "_rate" and len(saved) == 2:  # a run that was watched from its first step on
                saved = np.append(saved, 0.0)
            if name == "_bias" and len(saved) == 2:  # its draws were samples: more certain, until blocks outweigh them
                saved = np.vstack([saved, np.zeros(len(self.heads))])
            if name in self._OF_SIGNALS:
                saved = by_name(saved, state.get("signals"), getattr(self, name))
            setattr(self, name, saved)
        self._alarms = {int(index): _Alarm.model_validate(alarm) for index, alarm in state["alarms"].items()}
        self._step = int(state["step"])
        self._measure()

    _OF_SIGNALS = ("_recent", "_pressure")
    _ARRAYS = (*_OF_SIGNALS, "_bias", "_rate", "_loss", "_modes")
