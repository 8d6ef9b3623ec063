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
    bias_supports_drift: Flags
    """[N]: its scores move together, and the delta bias has the sign of the offset, and is large enough"""
    ratios: Floats
    """[2, N]: the least ratio of all conditions but persistence, 0 or more; 0 where one is unknown"""
    dangerous: frozenset[int]
    """the heads whose score is"""

    @classmethod
    def of(
        cls, growth: Growth, delta_bias_z: Floats, config: DetectorConfig, *, past_warmup: bool
    ) -> "WarningConditions":
        """delta_bias_z [N]: the accumulated delta bias in units of its standard error. past_warmup: False judges
        dangerous scores alone."""
        (offset_before, score_before), (offset, score) = growth.start, growth.end
        moved = offset - offset_before
        moved = np.copysign(moved, moved * offset)  # away from zero
        grown = score - score_before - growth.error[HeadSignal.SCORE]
        # What grows in a head's scores and not in their mean is a head that sharpens, which is no drift.
        together = ~(moved < config.shared_part * grown)
        supports = together & (delta_bias_z * np.sign(offset) >= config.support_z(len(delta_bias_z)))
        early = max(0.0, 1.0 - growth.step / config.settle_steps) if config.settle_steps else 0.0
        far = np.abs(offset)

        factor = (far + 1.0) / (np.abs(offset_before) + 1.0) / (1.0 + early * (config.young_growth - 1.0))
        drift = np.minimum(np.minimum(far / config.offset_level, moved / config.offset_change), factor)
        times = np.where(supports, 1.0, np.where(together, 1.0 + early, 2.0))
        ratios = np.empty_like(growth.end)
        np.minimum(drift, np.where(supports, math.inf, _UNSUPPORTED), out=ratios[HeadSignal.OFFSET])
        np.minimum(score / (config.score_level * times), score / score_before, out=ratios[HeadSignal.SCORE])
        if not past_warmup:
            ratios[HeadSignal.OFFSET] = 0.0
            ratios[HeadSignal.SCORE, score < DANGEROUS_SCORE / 2] = 0.0
        np.fmax(ratios, 0.0, out=ratios)

        heads = np.flatnonzero(ratios.max(axis=0, initial=0.0) >= _WORTH_A_FORECAST)
        if config.horizon_run_multiple is not None and len(heads):  # where no score was recorded, nothing is held back
            dangerous = np.where(together[heads], DANGEROUS_SCORE, 2 * DANGEROUS_SCORE)
            within = config.horizon_run_multiple * growth.step / courses(growth, heads, dangerous)
            ratios[:, heads] = np.fmin(ratios[:, heads], within)
        return cls(growth, supports, ratios, frozenset(np.flatnonzero(score >= DANGEROUS_SCORE).tolist()))
