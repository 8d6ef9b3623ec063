"""How near a warning every head is: each condition as a ratio that is 1 where it is just met."""

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, courses
from foreshock.monitor.detect.growth import Growth, HeadSignal
from foreshock.monitor.detect.thresholds import DetectorConfig

Flags = npt.NDArray[np.bool_]
_WORTH_A_FORECAST: Final = 0.6
"""A forecast is made of heads whose ratio comes to this by what costs less."""
_UNSUPPORTED: Final = 0.5
"""The most that a drift comes to which the delta bias does not support: its score has to show the rest."""


class WarningConditions(NamedTuple):
    """What the closed blocks show of every head."""

    growth: Growth
    moves_together: Flags
    """[N]: its scores move together, as far as is known. What grows in its scores and not in their mean is a head that
    sharpens, which is no drift"""
    bias_supports_drift: Flags
    """[N]: they do, and the delta bias has the sign of the offset, and is large enough"""

    @classmethod
    def of(cls, growth: Growth, delta_bias_z: Floats, config: DetectorConfig) -> "WarningConditions":
        """delta_bias_z [N]: the accumulated delta bias in units of its standard error."""
        grown = growth.end[HeadSignal.SCORE] - growth.start[HeadSignal.SCORE] - growth.error[HeadSignal.SCORE]
        together = ~(growth.moved()[HeadSignal.OFFSET] < config.shared_part * grown)
        same_way = delta_bias_z * np.sign(growth.end[HeadSignal.OFFSET])
        return cls(growth, together, together & (same_way >= config.support_z(len(delta_bias_z))))

    def ratios(self, config: DetectorConfig, *, past_warmup: bool) -> Floats:
        """The least ratio of all conditions but persistence, [2, N]; 0 where one is unknown.

        past_warmup: False judges dangerous scores alone.
        """
        growth, (offset, score) = self.growth, np.abs(self.growth.end)
        early_factor = max(0.0, 1.0 - growth.step / config.settle_steps) if config.settle_steps else 0.0
        ratios = np.empty_like(growth.end)

        factor = (
            (offset + 1.0)
            / (np.abs(growth.start[HeadSignal.OFFSET]) + 1.0)
            / (1.0 + early_factor * (config.young_growth - 1.0))
        )
        drift = np.minimum(offset / config.offset_level, growth.moved()[HeadSignal.OFFSET] / config.offset_change)
        drift = np.minimum(drift, factor)
        ratios[HeadSignal.OFFSET] = np.minimum(drift, np.where(self.bias_supports_drift, math.inf, _UNSUPPORTED))

        times = np.where(self.bias_supports_drift, 1.0, np.where(self.moves_together, 1.0 + early_factor, 2.0))
        ratios[HeadSignal.SCORE] = np.minimum(
            score / (config.score_level * times), score / growth.start[HeadSignal.SCORE]
        )

        if not past_warmup:
            ratios[HeadSignal.OFFSET] = 0.0
            ratios[HeadSignal.SCORE, score < DANGEROUS_SCORE / 2] = 0.0
        ratios[np.isnan(ratios)] = 0.0
        heads = np.flatnonzero(ratios.max(axis=0, initial=0.0) >= _WORTH_A_FORECAST)
        if config.horizon_run_multiple is not None and len(heads):  # where no score was recorded, nothing is held back
            dangerous = np.where(self.moves_together[heads], DANGEROUS_SCORE, 2 * DANGEROUS_SCORE)
            with np.errstate(divide="ignore"):
                within = config.horizon_run_multiple * growth.step / courses(growth, heads, dangerous)
            ratios[:, heads] = np.fmin(ratios[:, heads], within)
        return ratios
