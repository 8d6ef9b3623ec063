"""How near a warning every signal of every head is: each condition as a ratio that is 1 where it is just met."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.detect.growth import SIGNALS, Floats, Growth, lower_median, median_of_others
from foreshock.monitor.detect.thresholds import DetectorConfig

_WORTH_A_LOOK: Final = 0.6
"""Conditions that cost more are worked out for heads that meet the cheap ones so far."""


_MANY_HEADS: Final = 4
"""A layer of fewer heads has no typical head."""


class Nearness:
    """The conditions of a warning, for heads whose layers are `layers`."""

    def __init__(self, layers: Sequence[int], config: DetectorConfig) -> None:
        self._config = config
        names, self._layer_place = np.unique(np.array(layers, dtype=np.int64), return_inverse=True)
        members = [np.flatnonzero(self._layer_place == place) for place in range(len(names))]
        self._grid = np.full((len(names), max(map(len, members), default=0)), len(layers), dtype=np.int64)
        for place, rows in enumerate(members):
            self._grid[place, : len(rows)] = rows
        self._many = np.array([len(rows) >= _MANY_HEADS for rows in members], dtype=np.bool_)

    def __call__(self, growth: Growth, *, young: bool, ripe: bool, push: Floats) -> Floats:
        """The least ratio of all conditions of a signal, [len(SIGNALS), N]; 0 where one is unknown.

        young: more growth is asked for. ripe: False judges dangerous scores alone. push [N]: the accumulated delta bias
        in units of its standard error.
        """
        config = self._config
        near = np.zeros_like(growth.end)
        supported = push * np.sign(growth.end[0]) >= config.support_z
        offset_level = np.where(supported, config.offset_level, config.unsupported_level)
        offset_growth = np.where(supported, config.offset_growth, config.unsupported_growth)
        rules: tuple[tuple[Any, Any, float], ...] = (
            (offset_level, offset_growth, 1.0),
            (config.score_level, config.score_growth, 0.0),
            (config.tied_share, config.tied_growth, 0.0),
            (0.0, config.norm_growth, 0.0),
        )
        for row, (least_level, least_growth, floor) in enumerate(rules):
            level = np.abs(growth.end[row])
            found = np.divide(level, least_level, out=near[row])
            if not ripe:
                found[level < (DANGEROUS_SCORE / 4 if SIGNALS[row] == "score" else math.inf)] = 0.0
            if not any_at_least(found, _WORTH_A_LOOK):
                continue
            factor = level + floor
            factor /= np.abs(growth.start[row]) + floor
            least = np.maximum(least_growth, config.young_growth) if young else least_growth
            np.minimum(found, factor / least, out=found)
            if SIGNALS[row] == "offset":
                np.minimum(found, growth.change((row, slice(None))) / config.offset_change, out=found)
            likely = np.flatnonzero(found >= _WORTH_A_LOOK)
            if len(likely):
                found[likely] = np.minimum(found[likely], self._lasting(growth, row, likely, factor))
        if math.isnan(near.sum()):
            np.nan_to_num(near, copy=False, nan=0.0)
        return near

    def _lasting(self, growth: Growth, row: int, heads: npt.NDArray[np.int64], factor: Floats) -> Floats:
        """Whether growth goes on, is more than noise and more than that of the peers, for some `heads`."""
        config, of = self._config, (row, heads)
        end = growth.end[of]
        others, own = (peers[heads] for peers in self._peers(factor))
        if SIGNALS[row] == "offset":  # heads of a layer may drift together by a little; together and far is no comfort
            others = np.where(np.abs(end) < config.unsupported_level, np.fmax(others, own), others)
        parts = [
            growth.sigmas(of) / config.noise_multiple,
            factor[heads] / (np.fmax(others, 1.0) * config.peer_excess),
        ]
        if SIGNALS[row] != "ties":  # a share cannot grow for ever
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
