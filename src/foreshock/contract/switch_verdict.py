"""Whether a switch stopped a head's growth: its signals before the switch, compared with as many steps after it.

A head is arrested if each signal that grew before the switch (its score offset, its largest score) grows afterwards by
at most a third as much, in logarithms over as many steps. Below a level nothing counts as growth: the offset of a
healthy head wanders about zero, and its scores grow as it learns. docs/concepts.md says how often these bounds are
right on the recorded switches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

SIGNALS: Final = {"head.score_offset": "score offset", "head.score_max": "largest score"}
_LEVELS: Final = {"head.score_offset": 3.0, "head.score_max": 256.0}
"""Sizes up to which growth does not count, as the detectors' offset_level and score_level."""
_NOTICED: Final = math.log(1.1)
"""Growth over the window below which a signal did not grow: a tenth."""
_LEFT: Final = 1 / 3
"""Share of the growth before that an arrested head may keep."""
POINTS: Final = 48
_LEAST_POINTS: Final = 6


@dataclass(frozen=True)
class SignalGrowth:
    """Logarithm of a signal's growth over the window before a switch and over the one after it."""

    signal: str
    before: float
    after: float
    above: bool = True
    """whether the signal ended above the level from which its growth counts"""

    @property
    def arrested(self) -> bool:
        """Whether it grows no more, or by a third of its growth before at most, or is below its level."""
        return self.excess <= 0

    @property
    def excess(self) -> float:
        """By how much it grew more than an arrested signal may."""
        limit = max(_NOTICED / 5 if self.before > _NOTICED else _NOTICED, _LEFT * self.before)
        return self.after - limit if self.above else -math.inf

    def sentence(self, steps: int) -> str:
        """The growth in words."""
        before, after = (f"{100 * math.expm1(min(value, 20.0)):+.0f} %" for value in (self.before, self.after))
        return f"{self.signal} {before} in the {steps:,} steps before, {after} in those after"


def growth_of(key: str, before: Sequence[float | None], after: Sequence[float | None]) -> SignalGrowth | None:
    """How a signal, by its metric's key, grew on both sides of a switch; None if either has too few values."""
    first, then = _growth(before), _growth(after)
    if first is None or then is None:
        return None
    return SignalGrowth(SIGNALS[key], first[0], then[0], above=then[1] > _LEVELS[key])


def _growth(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Logarithm of the size of the last third over that of the first, and that last size; medians, so that one sample
    decides nothing."""
    size = np.abs(np.array([value for value in values if value is not None and math.isfinite(value)]))
    if len(size) < _LEAST_POINTS:
        return None
    third = len(size) // 3
    early, late = np.median(size[:third]), np.median(size[-third:])
    return float(np.log(max(late, 1e-12) / max(early, 1e-12))), float(late)
