"""When a head is warned about: every threshold, and each condition as a ratio that is 1 where it is just met."""

import math
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.bias_evidence import ASKED, BiasEvidence
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE, courses
from foreshock.monitor.detect.growth import Growth, HeadSignal

Flags = npt.NDArray[np.bool_]
_CLOSE: Final = 0.6
"""A forecast is made of heads whose ratio comes to this by what costs less."""
_WORTH_A_LOOK: Final = 0.1
"""Capital from which on closer samples may support a drift."""


class DetectorConfig(BaseModel):
    """When a head is warned about. Every threshold can be read in the evidence of a verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window_steps: int = Field(default=4000, ge=100, description="longest past that growth is measured over")
    block_steps: int = Field(
        default=100, ge=1, description="samples are joined into blocks of at most this many steps, or of one sample"
    )
    persist_blocks: int = Field(default=3, ge=1, description="blocks in a row in which a signal must trigger")
    quiet_steps: int = Field(default=2000, ge=1, description="steps without a trigger after which a verdict clears")
    offset_level: float = Field(default=3.0, gt=0, description="|offset| (nats) below which no drift is warned about")
    horizon_windows: float | None = Field(
        default=6.0,
        gt=0,
        description="a drift is warned about only if its largest |score| would reach 512 within this many windows; "
        "null: without a limit",
    )

    # What nobody has a reason to set.
    earliest_steps: ClassVar[int] = 500
    """Steps that have to be held before a drift is warned about."""
    settle_steps: ClassVar[int] = 5000
    """Healthy heads grow in so many steps of a run."""
    young_growth: ClassVar[float] = 3.0
    """Factor that 1 + |offset| grew by, asked at the first step; it falls evenly to none at `settle_steps`."""
    offset_change: ClassVar[float] = 1.5
    """Change of the offset (nats) over the window."""
    shared_part: ClassVar[float] = 0.25
    """Least part of what a head's largest |score| grew by that its offset must have moved by for its scores to move
    together; a head whose scores spread instead sharpens, which is no drift."""
    bare_offset: ClassVar[float] = 50.0
    """|offset| (nats) from which on a drift is warned about that no delta bias supports;"""
    steep_offset: ClassVar[float] = 15.0
    """or from here on"""
    steep_growth: ClassVar[float] = 5.0
    """where 1 + |offset| grew by this factor in the window."""
    growing_score: ClassVar[float] = 256.0
    """Largest |score| from which on fast growth is warned about, and a supported drift is critical."""
    overflow_steps: ClassVar[int] = 50
    """Steps in a row whose gradients overflow beside a finite loss before it is critical: a GradScaler skips them."""
    update_steps: ClassVar[int] = 1000
    """An active verdict is updated after this many steps."""


class WarningConditions(NamedTuple):
    """What the closed blocks show of every head, [N]."""

    growth: Growth
    rounds: Flags
    """the heads whose delta bias is applied"""
    won: Floats
    """capital of the bets that the delta bias has the offset's sign"""
    asked: float
    """capital that supports a drift"""
    supported: Flags
    ratios: Floats
    """[2, N]: the least ratio of all conditions but persistence, 0 or more; 0 where one is unknown"""
    urgent: npt.NDArray[np.int64]
    """the heads whose score is dangerous and does not fall, or will be dangerous before growth could last"""
    ahead: Mapping[int, float]
    """the courses of the heads that are close to a warning"""
    undecided: bool
    """whether a head drifts, that matters, and closer samples may yet support it"""

    @classmethod
    @np.errstate(divide="ignore", invalid="ignore")  # an unknown value is NaN, and no condition holds of it
    def of(cls, growth: Growth, bias: BiasEvidence, rounds: Flags, config: DetectorConfig) -> "WarningConditions":
        """rounds: the heads whose delta bias is applied."""
        (offset_before, score_before), (offset, score) = growth.start, growth.end
        latest, won, ratios = growth.last[HeadSignal.SCORE], bias.of(offset), np.zeros_like(growth.end)
        np.minimum(latest / config.growing_score, score / score_before, out=ratios[HeadSignal.SCORE])
        sign, far = np.copysign(1.0, offset), np.abs(offset)
        before = sign * offset_before
        # What grows in a head's scores and not in their mean is a head that sharpens, which is no drift.
        moved = far - before
        sharpens = moved < config.shared_part * (score - score_before - growth.error(HeadSignal.SCORE))
        np.maximum(moved, 0.0, out=moved)
        moved *= ~sharpens
        # Heads that may drift soon are tested too, or each would be the only one when it begins to.
        tested = (far >= config.offset_level / 2) & (moved >= config.offset_change / 2)
        asked = ASKED * max(int(np.count_nonzero(tested)), 1)
        drift, capital = ratios[HeadSignal.OFFSET], won
        if growth.held >= config.earliest_steps:
            factor = (far + 1.0) / (np.abs(before) + 1.0)
            early = max(0.0, 1.0 - growth.age / config.settle_steps)
            grown = factor / (1.0 + early * (config.young_growth - 1.0))
            drift = np.minimum(np.minimum(far / config.offset_level, moved / config.offset_change), grown)
            # Where scores were dangerous before, rounding follows from them.
            tests = rounds & ~(score_before >= DANGEROUS_SCORE)
            capital = won if tests.all() else won * tests
            steep = np.minimum(far / config.steep_offset, factor / config.steep_growth)
            newer = sign * growth.middle[HeadSignal.OFFSET] - before  # a jump has no older half
            bare = np.fmax(far / config.bare_offset, np.minimum(steep, newer / config.offset_change))
            np.minimum(drift, np.maximum(np.minimum(capital / asked, 1.0), bare), out=ratios[HeadSignal.OFFSET])
        np.fmax(ratios, 0.0, out=ratios)

        supported, undecided, urgent = np.zeros_like(rounds), False, np.zeros(0, dtype=np.int64)
        known: dict[int, float] = {}
        close = (np.maximum(*ratios) >= _CLOSE) | (drift >= 1.0) | (latest >= config.growing_score)
        if len(heads := np.flatnonzero(close)):  # of the others no forecast is worth its time
            drifts, evident, newest = drift[heads] >= 1.0, capital[heads] >= asked, latest[heads]
            supported[heads] = drifts & evident
            ahead, longest = courses(growth, heads), config.horizon_windows or math.inf
            known = dict(zip(heads.tolist(), ahead.tolist(), strict=True))
            windows = np.stack([np.where(supported[heads], longest, longest / 3), np.ones(len(heads))])
            near = np.fmin(ratios[:, heads], windows * growth.steps / ahead)  # as it was where no score was recorded
            may_show = drifts & ~evident & (capital[heads] >= _WORTH_A_LOOK) & (bias.bets[0, heads] > 0)
            undecided = bool((may_show & ~(ahead > longest * growth.steps)).any())
            high = (newest >= DANGEROUS_SCORE) & ~(newest < score_before[heads])
            near[HeadSignal.SCORE] = np.fmax(near[HeadSignal.SCORE], newest / DANGEROUS_SCORE * high)
            ratios[:, heads] = near
            soon = min(config.persist_blocks * config.block_steps, growth.steps)
            urgent = heads[high | ((newest >= config.growing_score) & (ahead < soon))]
        return cls(growth, rounds, won, asked, supported, ratios, urgent, known, undecided)

    def evidence(self, head: int) -> float:
        """The capital that its bets won, in parts of what supports a drift."""
        tests = self.rounds[head] and not self.growth.start[HeadSignal.SCORE, head] >= DANGEROUS_SCORE
        return float(self.won[head] * tests / self.asked)

    def refutes(self, head: int) -> bool:
        """Whether the delta bias, which is applied, speaks against a push the way of the offset."""
        return bool(self.rounds[head] and self.won[head] < 1.0)

    def course(self, head: int) -> float:
        """The steps until its score is dangerous (forecast.py)."""
        return self.ahead[head] if head in self.ahead else float(courses(self.growth, np.array([head]))[0])

    def dangerous(self, head: int) -> bool:
        """Whether the score of this head is dangerous."""
        return bool(self.growth.end[HeadSignal.SCORE, head] >= DANGEROUS_SCORE)
