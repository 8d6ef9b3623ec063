"""Early warning per head: what is measured, what trips, what is said. No clock, no I/O, no torch, no control run.

A head's scores may drift as a whole: softmax cannot see it, rounding can (paper, section 3.3).
Healthy heads move as far early in training, but they slow down with the age of the run, and a failing head does not.
So each signal is compared over the second half of the run's life so far (at most `window_steps`) with the head's own
past, with whether the growth goes on in the newer half of that window, and with its peers. The accumulated delta bias
names the cause and never warns: a drift the way that it pushes is believed early, any other only when it is large.
A verdict is latched until a head has been quiet for `quiet_steps`.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract import wire
from foreshock.contract.slots import Mode
from foreshock.monitor.foretelling import DANGEROUS_SCORE, forecast, sentence, who
from foreshock.monitor.growth import SIGNALS, Floats, Growth, History, lower_median, median_of_others
from foreshock.monitor.readings import Readings as Readings


class DetectorConfig(BaseModel):
    """When a head is warned about. Every threshold can be read in the evidence of a verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    earliest_steps: int = Field(
        default=500, ge=0, description="no growth is judged before this step, nor before twice the learning rate's rise"
    )
    settle_steps: int = Field(
        default=3500, ge=0, description="healthy heads grow in a run younger than this: young_growth is asked of them"
    )
    young_growth: float = Field(default=4.0, gt=1, description="least growth factor of a signal before settle_steps")
    window_steps: int = Field(default=4000, ge=100, description="longest past that growth is measured over")
    block_steps: int = Field(
        default=100, ge=1, description="samples are joined into blocks of at most this many steps, or of one sample"
    )
    persist_blocks: int = Field(default=3, ge=1, description="blocks in a row that a signal must trip before it counts")
    quiet_steps: int = Field(default=2000, ge=1, description="steps without a trip after which a verdict clears")
    offset_level: float = Field(default=3.0, gt=0, description="|offset| (nats) below which no drift is warned about")
    support_z: float = Field(
        default=2.0,
        gt=0,
        description="accumulated delta bias, standardised, that supports a drift its way, and names rounding",
    )
    unsupported_level: float = Field(default=10.0, gt=0, description="offset_level where the delta bias does not")
    unsupported_growth: float = Field(default=2.0, gt=1, description="offset_growth where the delta bias does not")
    offset_change: float = Field(default=1.5, gt=0, description="change of the offset (nats) over the window")
    offset_growth: float = Field(default=1.4, gt=1, description="factor by which 1 + |offset| grew over the window")
    score_level: float = Field(default=50.0, gt=0, description="largest |score| below which its growth is no warning")
    score_growth: float = Field(default=2.0, gt=1, description="factor by which the largest |score| grew")
    norm_growth: float = Field(default=4.0, gt=1, description="factor by which the norm of W_Q grew")
    peer_excess: float = Field(default=1.2, ge=1, description="a head must outgrow the other layers by this factor")
    share_of_newer_half: float = Field(default=0.45, ge=0, le=1, description="of the change; a line has 0.5, a stop 0")
    noise_multiple: float = Field(default=4.0, ge=0, description="change in units of its own standard error")
    tied_share: float = Field(default=0.3, gt=0, le=1, description="share of rows with several maxima")
    update_steps: int = Field(default=1000, ge=1, description="an active verdict is told again after this many steps")


class _Alarm(BaseModel):
    """A latched verdict, and what decides when it is told again or cleared."""

    verdict: wire.Verdict
    tripped_step: int


_RUN: Final = -1
"""Index of the alarm that speaks of the whole run."""
_WORTH_A_LOOK: Final = 0.6
"""Conditions that cost more are worked out for heads that meet the cheap ones so far."""
_MOST_RAISED: Final = 16
"""New verdicts of one sample: one NaN reaches every head of the model within a step."""


class Detectors:
    """Watches N heads online. `heads` names the (layer, head) of every row of the readings.

    `update` takes samples in the order of their steps. Vectorised over heads: a sample costs a few dozen operations on
    arrays [N], a closed block a few hundred.
    """

    def __init__(
        self, heads: Sequence[tuple[int, int]], config: DetectorConfig | None = None, *, rounds: bool = True
    ) -> None:
        self.heads = list(heads)
        self.config = config or DetectorConfig()
        self.rounds = rounds
        """Whether attention is computed in a type that rounds: in float32 no head fails by rounding."""
        count = len(self.heads)
        self._layers = np.array([layer for layer, _ in self.heads], dtype=np.int64)
        names, self._layer_place = np.unique(self._layers, return_inverse=True)
        members = [np.flatnonzero(self._layers == name) for name in names]
        self._grid = np.full((len(names), max(map(len, members), default=0)), count, dtype=np.int64)
        for place, rows in enumerate(members):
            self._grid[place, : len(rows)] = rows
        self._step = -1
        self._alarms: dict[int, _Alarm] = {}
        self._modes = np.full(count, -1, dtype=np.int32)
        self._forget()

    def _forget(self) -> None:
        count = len(self.heads)
        self._history = History(count, self.config.window_steps, self.config.block_steps)
        self._recent = np.zeros((self.config.persist_blocks, len(SIGNALS), count))
        self._pressure = np.zeros((len(SIGNALS), count))
        self._bias = np.zeros((2, count))
        self._rate = np.zeros(2)
        self._growth: Growth | None = None

    @property
    def pressure(self) -> Floats:
        """How near a warning each signal of each head is, [len(SIGNALS), N], 0 or more; at 1 it warns."""
        return self._pressure

    @property
    def risk(self) -> Floats:
        """How near a warning each head is, [N] in [0, 1]; 1 while a verdict on it is active."""
        risk: Floats = np.minimum(self._pressure.max(axis=0), 1.0)
        risk[[index for index in self._alarms if index != _RUN]] = 1.0
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
        if readings.offset.shape != (len(self.heads),):
            raise ValueError(f"readings of shape {readings.offset.shape} were given to {len(self.heads)} heads")
        if readings.step < self._step:
            self._forget()
        self._step = readings.step
        if readings.learning_rate is not None and readings.learning_rate > self._rate[0]:
            self._rate[:] = readings.learning_rate, readings.step
        with np.errstate(divide="ignore", invalid="ignore"):  # what is unknown is NaN, and stays it
            self._weigh_bias(readings)
            tripped = self._nonfinite(readings)
            if self._add(readings):
                growth = self._growth = self._measure()
                if growth is not None:
                    tripped = {**self._judge(growth, readings.step), **tripped}
            return self._tell(tripped, readings.step)

    def _weigh_bias(self, readings: Readings) -> None:
        """Sum delta_lp - delta_hp of every sample, and its square, since the head got its mode.

        Each sample counts as one draw: rows of one step are not independent.
        """
        changed = self._modes != readings.modes
        if changed.any():
            self._bias[:, changed] = 0.0
            self._modes = readings.modes.astype(np.int32)
        draw = readings.delta_sum
        if not math.isfinite(draw.sum()):
            draw = np.where(np.isfinite(draw), draw, 0.0)
        self._bias[0] += draw
        self._bias[1] += draw * draw

    def _bias_z(self, index: int) -> float:
        return float(self._bias[0, index] / math.sqrt(self._bias[1, index])) if self._bias[1, index] > 0 else math.nan

    def _nonfinite(self, readings: Readings) -> dict[int, str]:
        broken = readings.nonfinite_rows > 0
        if not math.isfinite(readings.offset.sum()):
            broken |= np.isinf(readings.offset)
        if not math.isfinite(readings.row_max_abs.sum()):
            broken |= readings.row_max_abs == np.inf  # the largest of no rows is -inf
        tripped = {int(index): "nonfinite" for index in np.flatnonzero(broken)[:_MOST_RAISED]}
        for value in (readings.loss, readings.grad_norm):
            if value is not None and not math.isfinite(value):
                tripped[_RUN] = "nonfinite"
        return tripped

    def _add(self, readings: Readings) -> bool:
        values = np.empty((3, len(self.heads)))
        values[0] = readings.offset
        np.fmax(readings.row_max_abs, readings.score_max, out=values[1])
        np.fmax(readings.tied_bf16, readings.tied_one, out=values[2])
        if not math.isfinite(values.sum()):
            np.copyto(values, np.nan, where=~np.isfinite(values))
        weight = readings.rows
        if not math.isfinite(weight.sum()):
            weight = np.where(np.isfinite(weight), weight, 1.0)
        return self._history.add(readings.step, readings.since_step, weight, values, readings.query_norm)

    def _measure(self) -> Growth | None:
        """Growth over the second half of the run's life so far."""
        return self._history.growth(min(self._history.last_step / 2, self.config.window_steps))

    def _judge(self, growth: Growth, step: int) -> dict[int, str]:
        """The heads that trip now, with their signal."""
        self._recent[self._history.closed % len(self._recent)] = self._near(growth, step)
        np.minimum(self._recent[0], self._recent[-1], out=self._pressure)
        for near in self._recent[1:-1]:
            np.minimum(self._pressure, near, out=self._pressure)
        if not _any_at_least(self._pressure, 1.0):
            return {}
        lasting = self._pressure >= 1.0
        tripped = {int(i): SIGNALS[int(np.argmax(lasting[:, i]))] for i in np.flatnonzero(lasting.any(axis=0))}
        return self._name_heads(tripped, growth)

    def _near(self, growth: Growth, step: int) -> Floats:
        """How far every condition of a signal is met, the least of them, [len(SIGNALS), N]; 0 where one is unknown."""
        config = self.config
        young = config.young_growth if step < config.settle_steps else 1.0
        ripe = step >= max(config.earliest_steps, 2 * self._rate[1])
        near = np.zeros_like(growth.end)
        supported = self._supported(growth)
        offset_level = np.where(supported, config.offset_level, config.unsupported_level)
        offset_growth = np.where(supported, config.offset_growth, config.unsupported_growth)
        rules: tuple[tuple[Any, Any, float], ...] = (
            (offset_level, offset_growth, 1.0),
            (config.score_level, config.score_growth, 0.0),
            (config.tied_share, 3.0, 0.0),
            (0.0, config.norm_growth, 0.0),
        )
        for row, (least_level, least_growth, floor) in enumerate(rules):
            level = np.abs(growth.end[row])
            found = np.divide(level, least_level, out=near[row])
            if not ripe:
                found[level < (DANGEROUS_SCORE / 4 if row == 1 else math.inf)] = 0.0
            if not _any_at_least(found, _WORTH_A_LOOK):
                continue
            factor = level + floor
            factor /= np.abs(growth.start[row]) + floor
            np.minimum(found, factor / np.maximum(least_growth, young), out=found)
            if row == 0:
                np.minimum(found, growth.change((row, slice(None))) / config.offset_change, out=found)
            likely = np.flatnonzero(found >= _WORTH_A_LOOK)
            if len(likely):
                found[likely] = np.minimum(found[likely], self._lasting(growth, row, likely, factor))
        if math.isnan(near.sum()):
            np.nan_to_num(near, copy=False, nan=0.0)
        return near

    def _supported(self, growth: Growth) -> npt.NDArray[np.bool_]:
        """The heads whose accumulated delta bias pushes their offset the way that it moves, [N]."""
        push = self._bias[0] * np.sign(growth.end[0])
        supported: npt.NDArray[np.bool_] = (push > 0) & (push >= self.config.support_z * np.sqrt(self._bias[1]))
        return supported

    def _lasting(self, growth: Growth, row: int, heads: npt.NDArray[np.int64], factor: Floats) -> Floats:
        """Whether growth goes on, is more than noise and more than that of the other layers, for some `heads`."""
        config, of = self.config, (row, heads)
        end = growth.end[of]
        parts = [
            growth.sigmas(of) / config.noise_multiple,
            factor[heads] / (np.fmax(self._other_layers(factor)[heads], 1.0) * config.peer_excess),
        ]
        if SIGNALS[row] != "ties":  # a share cannot grow for ever
            parts.append((end - growth.middle(of)) / (end - growth.start[of]) / config.share_of_newer_half)
        least: Floats = np.nan_to_num(np.minimum.reduce(parts), nan=0.0, neginf=0.0)
        return least

    def _other_layers(self, factor: Floats) -> Floats:
        """The typical growth of the heads of the other layers, [N]: failure begins in one layer (section 3.2).

        The lower median of the layers' lower medians, NaN without another layer.
        """
        known = np.append(factor, np.nan)
        typical: Floats = median_of_others(lower_median(known[self._grid]))[self._layer_place]
        return typical

    def _name_heads(self, tripped: dict[int, str], growth: Growth) -> dict[int, str]:
        """Where a whole layer shares one value, the trip is given to the head with the largest summed delta bias."""
        kept = dict(tripped)
        for layer in set(self._layers[list(tripped)].tolist()):
            members = np.flatnonzero(self._layers == layer)
            here = [index for index in members.tolist() if tripped.get(index) in ("offset", "score")]
            if not here or len(members) < 2 or np.ptp(growth.end[SIGNALS.index(tripped[here[0]]), members]) > 0:
                continue
            active = [index for index in members.tolist() if index in self._alarms]
            named = active[0] if active else int(members[np.argmax(np.abs(self._bias[0, members]))])
            signal = tripped[here[0]]
            for index in here:
                del kept[index]
            kept[named] = signal
        return kept

    def _tell(self, tripped: dict[int, str], step: int) -> list[wire.Verdict]:
        told: list[wire.Verdict] = []
        for index, active in self._alarms.items():
            if index not in tripped and self._dangerous(index):
                tripped[index] = active.verdict.signal
        for index, signal in sorted(tripped.items(), key=self._drifted, reverse=True):
            alarm = self._alarms.get(index)
            if alarm is None and len(told) >= _MOST_RAISED:
                continue
            evidence = self._evidence(index)
            cause = self._cause(index, signal, evidence)
            severity: wire.Severity = "warning"
            if signal == "nonfinite" or evidence.get("score", 0.0) >= DANGEROUS_SCORE / 2:
                severity = "critical"
            if alarm is not None:
                alarm.tripped_step = step
                if alarm.verdict.cause == "rounding":
                    cause = "rounding"  # what a switch was founded on does not change under it
                same = (alarm.verdict.severity, alarm.verdict.cause) == (severity, cause)
                if same and step - alarm.verdict.step < self.config.update_steps:
                    continue
            likely, low, high = forecast(self._growth, index) if signal != "nonfinite" else (None, None, None)
            layer, head = self.heads[index] if index != _RUN else (None, None)
            verdict = wire.Verdict(
                id=alarm.verdict.id if alarm else f"{'run' if layer is None else f'l{layer}h{head}'}-{step}",
                step=step,
                state="updated" if alarm else "raised",
                severity=severity,
                layer=layer,
                head=head,
                cause=cause,
                signal=signal,
                evidence=evidence,
                forecast_steps=likely,
                forecast_low_steps=low,
                forecast_high_steps=high,
                sentence="",
            )
            verdict = verdict.model_copy(update={"sentence": sentence(verdict)})
            told.append(verdict)
            self._alarms[index] = _Alarm(verdict=verdict, tripped_step=step)
        for index, active in list(self._alarms.items()):
            if step - active.tripped_step >= self.config.quiet_steps:
                del self._alarms[index]
                quiet = f"{who(active.verdict)} has been quiet for {step - active.tripped_step} steps."
                told.append(active.verdict.model_copy(update={"step": step, "state": "cleared", "sentence": quiet}))
        return told

    def _drifted(self, trip: tuple[int, str]) -> float:
        """How far a tripped head's offset has gone, so that the head that drifted farthest is told first."""
        if trip[0] == _RUN or self._growth is None:
            return math.inf
        return float(np.nan_to_num(np.abs(self._growth.end[0, trip[0]])))

    def _dangerous(self, index: int) -> bool:
        """A head above the dangerous score is not quiet, whichever way it moves."""
        growth = self._growth
        return index != _RUN and growth is not None and bool(growth.end[1, index] >= DANGEROUS_SCORE)

    def _evidence(self, index: int) -> dict[str, float]:
        growth = self._growth
        if index == _RUN or growth is None:
            return {}
        named = {
            "offset": growth.end[0, index],
            "offset_before": growth.start[0, index],
            "score": growth.end[1, index],
            "score_before": growth.start[1, index],
            "score_error": growth.jitter((1, index)),
            "query_norm": growth.end[3, index],
            "query_norm_before": growth.start[3, index],
            "tied_share": growth.end[2, index],
            "window_steps": growth.steps,
            "delta_bias_z": self._bias_z(index),
        }
        return {name: float(value) for name, value in named.items() if math.isfinite(value)}

    def _cause(self, index: int, signal: str, evidence: dict[str, float]) -> wire.Cause:
        """Rounding moves all scores of a head together, the way its delta bias pushes; a step too large spreads them.

        No head fails by rounding where nothing rounds, or where its delta is exact. A delta bias that is not
        significant is enough where the offset moved by half of what the largest score did, unless it pushes back.
        """
        if "offset" not in evidence and "score" not in evidence:
            return "other"
        if not self.rounds or index == _RUN or self._modes[index] & Mode.EXACT_DELTA:
            return "score growth" if signal != "nonfinite" else "other"
        now, before = evidence.get("offset", 0.0), evidence.get("offset_before", 0.0)
        moved = abs(now - before) if abs(now) > abs(before) else 0.0  # through zero, all of the way counts
        grown = evidence.get("score", math.inf) - evidence.get("score_before", 0.0)
        together = moved >= grown / 2 - evidence.get("score_error", 0.0)
        push = evidence.get("delta_bias_z", math.nan) * math.copysign(1.0, now)
        pushed = push >= self.config.support_z or (together and not push <= 0)  # NaN: no bias was recorded
        if moved >= self.config.offset_change and pushed:
            return "rounding"
        return "score growth" if signal != "nonfinite" else "other"

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next sample depends on; JSON-able."""
        return {
            "heads": [list(head) for head in self.heads],
            "step": self._step,
            "alarms": {str(index): alarm.model_dump(mode="json") for index, alarm in self._alarms.items()},
            "history": self._history.state_dict(),
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
        for name in self._ARRAYS:
            setattr(self, name, wire.Array.model_validate(state[name]).numpy())
        self._alarms = {int(index): _Alarm.model_validate(alarm) for index, alarm in state["alarms"].items()}
        self._step = int(state["step"])
        self._growth = self._measure()

    _ARRAYS = ("_recent", "_pressure", "_bias", "_rate", "_modes")


def _any_at_least(values: Floats, limit: float) -> bool:
    largest = float(values.max(initial=0.0))
    return largest >= limit or math.isnan(largest)
