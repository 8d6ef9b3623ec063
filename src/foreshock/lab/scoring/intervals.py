"""How far a number from few runs may be from the truth: exact intervals of counts and shares, resampled ones of others.

Runs are what is independent here, not steps or alarms: intervals of leads and shares are over runs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

CONFIDENCE: Final = 0.95
Interval = tuple[float, float]
_DRAWS: Final = 2000


def poisson_upper_bound(count: int) -> float:
    """The mean above which `count` events or fewer are less likely than 1 - CONFIDENCE (Garwood's exact bound)."""

    def chance(mean: float) -> float:
        terms = [math.exp(-mean)]
        for event in range(1, count + 1):
            terms.append(terms[-1] * mean / event)
        return math.fsum(terms)

    return _where(lambda mean: chance(mean) <= 1 - CONFIDENCE, 0.0, 10.0 + 3.0 * count)


def share_interval(right: int, of: int) -> Interval | None:
    """Two-sided interval of a share (Clopper and Pearson's exact one); None of nothing. Raises ValueError for a count
    that is no part of the other."""
    if not 0 <= right <= of:
        raise ValueError(f"{right} of {of} is no share; give a count from 0 to {of}")
    if not of:
        return None
    tail = (1 - CONFIDENCE) / 2

    def at_least(share: float) -> float:
        """Chance of `right` or more."""
        return math.fsum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(right, of + 1))

    def at_most(share: float) -> float:
        return math.fsum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(right + 1))

    low = _where(lambda share: at_least(share) >= tail, 0.0, 1.0) if right else 0.0
    high = _where(lambda share: at_most(share) <= tail, 0.0, 1.0) if right < of else 1.0
    return low, high


def _where(reached: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that turns true once does so, by halving."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def over_runs(values: Sequence[float]) -> Interval | None:
    """Interval of the median of runs, by drawing as many with replacement, always the same draws; None for fewer than
    two runs, which say nothing of how runs differ."""
    if len(values) < 2:
        return None
    runs = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(runs), size=(_DRAWS, len(runs)))
    found, tail = np.median(runs[drawn], axis=1), (1 - CONFIDENCE) / 2
    return float(np.quantile(found, tail)), float(np.quantile(found, 1 - tail))
