"""How near a warning every head is: each condition as a ratio that is 1 where it is just met."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, courses
from foreshock.monitor.detect.growth import Growth, HeadSignal
from foreshock.monitor.detect.thresholds import DetectorConfig

Flags = npt.NDArray[np.bool_]
_WORTH_A_LOOK: Final = 0.6
"""A forecast is made of heads that come so near by what costs less."""
_UNPUSHED: Final = 0.5
"""A drift that the delta bias does not push comes so near at most: its score has to say the rest."""


def pushed_heads(growth: Growth, push: Floats, support: float, config: DetectorConfig) -> tuple[Flags, Flags]:
    """The heads [N] whose scores move together, as far as is known, and those of them that their bias pushes.

    push [N]: the accumulated delta bias in units of its standard error; `support` of them support a drift. What grows
    in the scores of a head and not in their mean is a head that sharpens.
    """
    grown = growth.end[HeadSignal.SCORE] - growth.start[HeadSignal.SCORE] - growth.error[HeadSignal.SCORE]
    together = ~(growth.moved()[HeadSignal.OFFSET] < config.shared_part * grown)
    return together, together & (push * np.sign(growth.end[HeadSignal.OFFSET]) >= support)


def nearness(growth: Growth, together: Flags, pushed: Flags, *, ripe: bool, config: DetectorConfig) -> Floats:
    """The least ratio of all conditions but persistence, [2, N]; 0 where one is unknown.

    together, pushed [N]: as `pushed_heads` tells. ripe: False judges dangerous scores alone.
    """
    (offset, score), moved, near = np.abs(growth.end), growth.moved(), np.empty_like(growth.end)
    youth = max(0.0, 1.0 - growth.step / config.settle_steps) if config.settle_steps else 0.0

    factor = (offset + 1.0) / (np.abs(growth.start[HeadSignal.OFFSET]) + 1.0)
    drift = np.minimum(offset / config.offset_level, moved[HeadSignal.OFFSET] / config.offset_change)
    np.minimum(drift, factor / (1.0 + youth * (config.young_growth - 1.0)), out=drift)
    np.minimum(drift, np.where(pushed, math.inf, _UNPUSHED), out=near[HeadSignal.OFFSET])

    unpushed = np.where(together, 1.0 + youth, 2.0)
    level = score / (config.score_level * np.where(pushed, 1.0, unpushed))
    np.minimum(level, score / growth.start[HeadSignal.SCORE], out=near[HeadSignal.SCORE])

    if not ripe:
        near[HeadSignal.OFFSET] = 0.0
        near[HeadSignal.SCORE, score < DANGEROUS_SCORE / 2] = 0.0
    near[np.isnan(near)] = 0.0
    heads = np.flatnonzero(near.max(axis=0, initial=0.0) >= _WORTH_A_LOOK)
    if config.horizon_lives is not None and len(heads):  # where no score was recorded, nothing is held back
        dangerous = np.where(together[heads], DANGEROUS_SCORE, 2 * DANGEROUS_SCORE)
        with np.errstate(divide="ignore"):
            sight = config.horizon_lives * growth.step / courses(growth, heads, dangerous)
        near[:, heads] = np.fmin(near[:, heads], sight)
    return near
