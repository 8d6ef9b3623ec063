"""How near a warning every signal of every head is: each condition as a ratio that is 1 where it is just met."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.forecast import FORESEEN, courses
from foreshock.monitor.detect.growth import Growth, lower_median, median_of_others
from foreshock.monitor.detect.readings import is_finite, largest
from foreshock.monitor.detect.signals import DANGEROUS_SCORE, SIGNALS, Drifting, HeadSignal
from foreshock.monitor.detect.thresholds import DetectorConfig

_WORTH_A_LOOK: Final = 0.6
"""Conditions that cost more are worked out for heads that meet the cheap ones so far."""


_UNPUSHED: Final = 0.5
"""A drift that the delta bias does not push comes so near a warning at most: its score has to say the rest."""
_EARLY: Final = [info.judged_early_from for info in SIGNALS.values()]
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
        self._missing = self._grid == len(layers)
        self._is_ragged = bool(self._missing.any())
        self._many = np.array([len(rows) >= _MANY_HEADS for rows in members], dtype=np.bool_)

    def __call__(self, growth: Growth, *, step: int, ripe: bool, push: Floats, out: Floats | None = None) -> Floats:
        """The least ratio of all conditions of a signal, [len(SIGNALS), N]; 0 where one is unknown. Written into `out`.

        step: the run's age; the younger, the more is asked for. ripe: False judges dangerous scores alone.
        push [N]: the accumulated delta bias in units of its standard error.
        """
        config = self._config
        near = np.empty_like(growth.end) if out is None else out
        levels = np.abs(growth.end)
        if not ripe and not any(map(any_at_least, levels, _EARLY)):
            near[:] = 0.0  # nothing else would come of it
            return near
        youth = max(0.0, 1.0 - step / config.settle_steps) if config.settle_steps else 0.0
        heads = self._drifting(growth, push)
        for signal, info in SIGNALS.items():
            least_level, least_growth = info.least(config, heads, youth), info.least_growth(config, youth)
            level = levels[signal]
            found = np.divide(level, least_level, out=near[signal])
            if not ripe:
                found[level < info.judged_early_from] = 0.0
            if not any_at_least(found, _WORTH_A_LOOK):
                continue
            factor = _grown(np.abs(growth.starts(signal)), level, info.floor)
            np.minimum(found, factor if least_growth == 1.0 else factor / least_growth, out=found)
            if info.least_change is not None:
                np.minimum(found, growth.changes(signal) / info.least_change(config), out=found)
            if info.ahead_of_score:
                score = levels[HeadSignal.SCORE] / (config.score_level / 2)
                np.minimum(found, np.where(np.isnan(score), math.inf, score), out=found)
            if info.pushed:
                np.minimum(found, np.where(heads.pushed, math.inf, _UNPUSHED), out=found)
            likely = (found >= _WORTH_A_LOOK).nonzero()[0]
            if len(likely):
                found[likely] = np.minimum(found[likely], self._lasting(growth, signal, likely, factor))
        flat = near.ravel()
        if math.isnan(flat.dot(flat)):
            np.nan_to_num(near, copy=False, nan=0.0)
        self._bring_into_sight(near, growth, step, heads.together)
        return near

    def _drifting(self, growth: Growth, push: Floats) -> Drifting:
        """How heads move. What grows in the scores of a head and not in their mean is a head that sharpens."""
        score = HeadSignal.SCORE
        grown = growth.end[score] - growth.starts(score)
        grown -= growth.jitter((score, slice(None)))
        grown *= self._config.shared_part
        together = ~(growth.changes(HeadSignal.OFFSET) < grown)
        return Drifting(together, together & (push * np.sign(growth.end[HeadSignal.OFFSET]) >= self.support))

    def _bring_into_sight(self, near: Floats, growth: Growth, step: int, together: npt.NDArray[np.bool_]) -> None:
        """Neither offset nor score of a head is nearer than its harm, which has to come within some times the run's
        life so far.

        What drifts by little for long meets every condition on growth, and harms nobody. Where no score was recorded,
        nothing is foreseen and nothing is held back. A head that sharpens has to come to twice the score, as it has to
        have twice the score to be looked at: one that settles a little past what is dangerous trains on.
        """
        foreseen = near[FORESEEN]
        if self._config.horizon_lives is None or not any_at_least(foreseen, _WORTH_A_LOOK):
            return
        heads = np.flatnonzero(np.maximum(*foreseen) >= _WORTH_A_LOOK)
        with np.errstate(divide="ignore"):
            dangerous = np.where(together[heads], DANGEROUS_SCORE, 2 * DANGEROUS_SCORE)
            sight = self._config.horizon_lives * step / courses(growth, heads, dangerous)
        foreseen[:, heads] = np.fmin(foreseen[:, heads], sight)

    def _lasting(self, growth: Growth, signal: HeadSignal, heads: npt.NDArray[np.int64], factor: Floats) -> Floats:
        """Whether growth goes on, is more than noise and more than that of the peers, for some `heads`.

        Failure begins in one layer, in few of its heads (section 3.2). So the peers are the typical other layer: a
        layer's typical head is its lower median, the typical other layer the lower median of these.
        """
        config, of, info = self._config, (signal, heads), SIGNALS[signal]
        end = growth.end[signal][heads]
        size = np.abs(end)
        grid = factor.take(self._grid, mode="clip")
        if self._is_ragged:
            grid[self._missing] = np.nan
        layers = lower_median(grid)
        others = median_of_others(layers)[self._layer_place[heads]]
        others = np.where(size < info.peers_count_below, others, np.nan)
        if info.beside_own_layer:  # heads may drift together by a little; together and far is no comfort
            own = self._typical(grid, layers)[self._layer_place[heads]]
            others = np.where(size < config.far_offset, np.fmax(others, own), others)
        least = growth.sigmas(of) / config.noise_multiple
        excess = (factor[heads] - 1.0) / (config.peer_excess * (others - 1.0))
        np.minimum(least, np.where(others > 1.0, excess, math.inf), out=least)
        if info.goes_on:
            newer = (end - growth.middle(of)) / (end - growth.start(of)) / config.share_of_newer_half
            np.minimum(least, newer, out=least)
        return least if is_finite(least) else np.nan_to_num(least, nan=0.0, neginf=0.0)

    def _typical(self, grid: Floats, layers: Floats) -> Floats:
        """The growth of the typical head of each layer, NaN where it has fewer than four heads, or one for all."""
        many = self._many & (np.fmax.reduce(grid, axis=1) > np.fmin.reduce(grid, axis=1))
        return np.where(many, layers, np.nan)


def _grown(start: Floats, end: Floats, floor: float) -> Floats:
    """The factor from start to end, `floor` added to both; written into `start`."""
    if not floor:
        return np.divide(end, start, out=start)
    start += floor
    return np.divide(end + floor, start, out=start)


def any_at_least(values: Floats, limit: float) -> bool:
    """Whether a value reaches the limit, or is NaN."""
    most = largest(values)
    return most >= limit or math.isnan(most)
