"""Decides whether a switch stopped a head's growth, from its signals in equally many steps before and after the switch.

A head is arrested if each signal that grew before the switch (its score offset, its largest score) grows afterwards by
at most a third as much, in logarithms over as many steps. Growth below a level is ignored, because the offset of a
healthy head varies around zero, and its scores grow as it learns. docs/concepts.md states how often these bounds are
right on recorded switches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

SIGNALS: Final = {"head.score_offset": "score offset", "head.score_max": "largest score"}
_LEVELS: Final = {"head.score_offset": 3.0, "head.score_max": 256.0}
"""Sizes up to which growth is ignored, the same as the detectors' offset_level and score_level."""
_NOTICED: Final = math.log(1.1)
"""Smallest growth over the window that counts: a tenth."""
_LEFT: Final = 1 / 3
"""Maximum growth of an arrested head, as a share of its growth before the switch."""
POINTS: Final = 48
_LEAST_POINTS: Final = 6


@dataclass(frozen=True)
class SignalGrowth:
    """Logarithm of a signal's growth over the window before a switch and over the one after it."""

    signal: str
    before: float
    after: float
    above: bool = True
    """Whether the signal ended above the level from which its growth counts."""

    @property
    def arrested(self) -> bool:
        """Whether it stopped growing, or grows at most a third as much as before, or is below its level."""
        return self.excess <= 0

    @property
    def excess(self) -> float:
        """Growth above the limit for an arrested signal."""
        limit = max(_NOTICED / 5 if self.before > _NOTICED else _NOTICED, _LEFT * self.before)
        return self.after - limit if self.above else -math.inf

    def sentence(self, steps: int) -> str:
        """Return the growth in words."""
        before, after = (f"{100 * math.expm1(min(value, 20.0)):+.0f} %" for value in (self.before, self.after))
        return f"{self.signal} {before} in the {steps:,} steps before, {after} in those after"


def growth_of(key: str, before: Sequence[float | None], after: Sequence[float | None]) -> SignalGrowth | None:
    """Return the growth of a signal, by its metric's key, before and after a switch; None with too few values."""
    first, then = _growth(before), _growth(after)
    if first is None or then is None:
        return None
    return SignalGrowth(SIGNALS[key], first[0], then[0], above=then[1] > _LEVELS[key])


def _growth(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the logarithm of the last third's size over the first third's, and the last size.

    Sizes are medians, so that a single sample cannot decide.
    """
    size = np.abs(np.array([value for value in values if value is not None and math.isfinite(value)]))
    if len(size) < _LEAST_POINTS:
        return None
    third = len(size) // 3
    early, late = np.median(size[:third]), np.median(size[-third:])
    return float(np.log(max(late, 1e-12) / max(early, 1e-12))), float(late)
