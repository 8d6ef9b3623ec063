"""How near a warning every signal of every head is: each condition as a ratio that is 1 where it is just met."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.forecast import courses
from foreshock.monitor.detect.growth import Growth, lower_median, median_of_others
from foreshock.monitor.detect.signals import SIGNALS, HeadSignal
from foreshock.monitor.detect.thresholds import DetectorConfig

_WORTH_A_LOOK: Final = 0.6
"""Conditions that cost more are worked out for heads that meet the cheap ones so far."""


_UNPUSHED: Final = 0.5
"""A drift that the delta bias does not push comes so near a warning at most: its score has to say the rest."""
_FORESEEN: Final = np.array([int(HeadSignal.OFFSET), int(HeadSignal.SCORE)])
"""Signals whose course a forecast goes on with."""
_MANY_HEADS: Final = 4
"""A layer of fewer heads has no typical head."""


class Nearness:
    """The conditions of a warning, for heads whose layers are `layers`."""

    def __init__(self, layers: Sequence[int], config: DetectorConfig) -> None:
        self._config = config
        self.support = config.support_z(len(layers))
        """standard errors of its delta bias by which a drift is supported"""
        names, self._layer_place = np.unique(np.array(layers, dtype=np.int64), return_inverse=True)
        members = [np.flatnonzero(self._layer_place == place) for place in range(len(names))]
        self._grid = np.full((len(names), max(map(len, members), default=0)), len(layers), dtype=np.int64)
        for place, rows in enumerate(members):
            self._grid[place, : len(rows)] = rows
        self._many = np.array([len(rows) >= _MANY_HEADS for rows in members], dtype=np.bool_)

    def __call__(self, growth: Growth, *, step: int, ripe: bool, push: Floats) -> Floats:
        """The least ratio of all conditions of a signal, [len(SIGNALS), N]; 0 where one is unknown.

        step: the run's age; the younger, the more is asked for. ripe: False judges dangerous scores alone.
        push [N]: the accumulated delta bias in units of its standard error.
        """
        config = self._config
        near = np.zeros_like(growth.end)
        youth = max(0.0, 1.0 - step / config.settle_steps) if config.settle_steps else 0.0
        pushed = push * np.sign(growth.end[HeadSignal.OFFSET]) >= self.support
        for signal, info in SIGNALS.items():
            least_level, least_growth = info.least(config, pushed, youth), info.least_growth(config, youth)
            level = np.abs(growth.end[signal])
            found = np.divide(level, least_level, out=near[signal])
            if not ripe:
                found[level < info.judged_early_from] = 0.0
            if not any_at_least(found, _WORTH_A_LOOK):
                continue
            factor = level + info.floor
            factor /= np.abs(growth.start[signal]) + info.floor
            np.minimum(found, factor / least_growth, out=found)
            if info.least_change is not None:
                np.minimum(found, growth.change((signal, slice(None))) / info.least_change(config), out=found)
            if info.pushed:
                found[~pushed] = np.minimum(found[~pushed], _UNPUSHED)
            likely = np.flatnonzero(found >= _WORTH_A_LOOK)
            if len(likely):
                found[likely] = np.minimum(found[likely], self._lasting(growth, signal, likely, factor))
        if math.isnan(near.sum()):
            np.nan_to_num(near, copy=False, nan=0.0)
        self._bring_into_sight(near, growth, step)
        return near

    def _bring_into_sight(self, near: Floats, growth: Growth, step: int) -> None:
        """Neither offset nor score of a head is nearer than its harm, which has to come within some times the run's
        life so far.

        What drifts by little for long meets every condition on growth, and harms nobody. Where no score was recorded,
        nothing is foreseen and nothing is held back.
        """
        if self._config.horizon_lives is None or not any_at_least(near[_FORESEEN], _WORTH_A_LOOK):
            return
        heads = np.flatnonzero(near[_FORESEEN].max(axis=0) >= _WORTH_A_LOOK)
        with np.errstate(divide="ignore"):
            sight = self._config.horizon_lives * step / courses(growth, heads)
        held = np.ix_(_FORESEEN, heads)
        near[held] = np.fmin(near[held], sight)

    def _lasting(self, growth: Growth, signal: HeadSignal, heads: npt.NDArray[np.int64], factor: Floats) -> Floats:
        """Whether growth goes on, is more than noise and more than that of the peers, for some `heads`."""
        config, of, info = self._config, (signal, heads), SIGNALS[signal]
        end = growth.end[of]
        others, own = (peers[heads] for peers in self._peers(factor))
        others = np.where(np.abs(end) < info.peers_count_below, others, np.nan)
        if info.beside_own_layer:  # heads may drift together by a little; together and far is no comfort
            others = np.where(np.abs(end) < config.far_offset, np.fmax(others, own), others)
        parts = [
            growth.sigmas(of) / config.noise_multiple,
            np.where(others > 1.0, (factor[heads] - 1.0) / (config.peer_excess * (others - 1.0)), math.inf),
        ]
        if info.goes_on:
            parts.append((end - growth.middle(of)) / (end - growth.start[of]) / config.share_of_newer_half)
        least: Floats = np.nan_to_num(np.minimum.reduce(parts), nan=0.0, neginf=0.0)
        return least

    def _peers(self, factor: Floats) -> tuple[Floats, Floats]:
        """The typical growth of a head's peers in the other layers and in its own, [N] each; NaN without peers.

        Failure begins in one layer, in few of its heads (section 3.2). A layer's typical head is its lower median, the
        typical other layer the lower median of these. The own layer counts where it has at least four heads that were
        recorded one by one.
        """
        grid = np.append(factor, np.nan)[self._grid]
        layers = lower_median(grid)
        many = self._many & (np.fmax.reduce(grid, axis=1) > np.fmin.reduce(grid, axis=1))
        return median_of_others(layers)[self._layer_place], np.where(many, layers, np.nan)[self._layer_place]


def any_at_least(values: Floats, limit: float) -> bool:
    """Whether a value reaches the limit, or is NaN."""
    largest = float(values.max(initial=0.0))
    return largest >= limit or math.isnan(largest)
