"""Decide when to warn about a head: all thresholds, and each condition as a ratio that is 1 if it is just met."""

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
"""Ratio of the cheaper conditions from which on a head's course is forecast."""
_WORTH_A_LOOK: Final = 0.1
"""Capital from which on more frequent samples may support a drift."""


class DetectorConfig(BaseModel):
    """Thresholds for warnings about heads. The evidence of a verdict has the values that are compared with them."""

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

    # Constants that users do not need to set.
    earliest_steps: ClassVar[int] = 500
    """Steps that the stored past must have before a warning about a drift."""
    settle_steps: ClassVar[int] = 5000
    """In this many first steps of a run, healthy heads grow too."""
    young_growth: ClassVar[float] = 3.0
    """Required growth factor of 1 + |offset| at the first step; it decreases linearly to 1 at `settle_steps`."""
    offset_change: ClassVar[float] = 1.5
    """Change of the offset (nats) over the window."""
    shared_part: ClassVar[float] = 0.25
    """Smallest change of a head's offset, as a share of the growth of its largest |score|, that counts as a drift. If
    the change is smaller, the scores spread: the head sharpens, which is not a drift."""
    bare_offset: ClassVar[float] = 50.0
    """|offset| (nats) from which on a drift leads to a warning without support by the delta bias."""
    steep_offset: ClassVar[float] = 15.0
    """The same for a steep drift, in which 1 + |offset| grew by `steep_growth`."""
    steep_growth: ClassVar[float] = 5.0
    """Growth factor of 1 + |offset| in the window from which on a drift is steep."""
    growing_score: ClassVar[float] = 256.0
    """Largest |score| from which on fast growth leads to a warning, and a supported drift is critical."""
    overflow_steps: ClassVar[int] = 50
    """Consecutive steps with overflowing gradients but a finite loss before this is critical: a GradScaler skips
    them."""
    update_steps: ClassVar[int] = 1000
    """An active verdict is updated after this many steps."""


class WarningConditions(NamedTuple):
    """Conditions of warnings for every head, [N], computed from the closed blocks."""

    growth: Growth
    rounds: Flags
    """the heads whose delta bias is applied"""
    won: Floats
    """capital of the bets that the delta bias has the offset's sign"""
    asked: float
    """capital that is required to support a drift"""
    supported: Flags
    ratios: Floats
    """the smallest ratio of all conditions except persistence, at least 0, [2, N]; 0 if a value is unknown"""
    urgent: npt.NDArray[np.int64]
    """heads whose score is dangerous and does not fall, or will be dangerous before growth can be persistent"""
    ahead: Mapping[int, float]
    """the courses of the heads that are close to a warning"""
    undecided: bool
    """whether any head has a relevant drift that more frequent samples could still support"""

    @classmethod
    @np.errstate(divide="ignore", invalid="ignore")  # unknown values are NaN and do not meet any condition
    def of(cls, growth: Growth, bias: BiasEvidence, rounds: Flags, config: DetectorConfig) -> "WarningConditions":
        """Compute the conditions. rounds: the heads whose delta bias is applied."""
        (offset_before, score_before), (offset, score) = growth.start, growth.end
        latest, won, ratios = growth.last[HeadSignal.SCORE], bias.of(offset), np.zeros_like(growth.end)
        np.minimum(latest / config.growing_score, score / score_before, out=ratios[HeadSignal.SCORE])
        sign, far = np.copysign(1.0, offset), np.abs(offset)
        before = sign * offset_before
        # If scores grow but their mean does not, the head sharpens, which is not a drift.
        moved = far - before
        sharpens = moved < config.shared_part * (score - score_before - growth.error(HeadSignal.SCORE))
        np.maximum(moved, 0.0, out=moved)
        moved *= ~sharpens
        # Heads that may drift soon count as tested too. Otherwise each would be the only one when its drift begins.
        tested = (far >= config.offset_level / 2) & (moved >= config.offset_change / 2)
        asked = ASKED * max(int(np.count_nonzero(tested)), 1)
        drift, capital = ratios[HeadSignal.OFFSET], won
        if growth.held >= config.earliest_steps:
            factor = (far + 1.0) / (np.abs(before) + 1.0)
            early = max(0.0, 1.0 - growth.age / config.settle_steps)
            grown = factor / (1.0 + early * (config.young_growth - 1.0))
            drift = np.minimum(np.minimum(far / config.offset_level, moved / config.offset_change), grown)
            # If scores were dangerous at the start, the bias is a consequence of them.
            tests = rounds & ~(score_before >= DANGEROUS_SCORE)
            capital = won if tests.all() else won * tests
            steep = np.minimum(far / config.steep_offset, factor / config.steep_growth)
            newer = sign * growth.middle[HeadSignal.OFFSET] - before  # a jump does not have an older half
            bare = np.fmax(far / config.bare_offset, np.minimum(steep, newer / config.offset_change))
            np.minimum(drift, np.maximum(np.minimum(capital / asked, 1.0), bare), out=ratios[HeadSignal.OFFSET])
        np.fmax(ratios, 0.0, out=ratios)

        supported, undecided, urgent = np.zeros_like(rounds), False, np.zeros(0, dtype=np.int64)
        known: dict[int, float] = {}
        close = (np.maximum(*ratios) >= _CLOSE) | (drift >= 1.0) | (latest >= config.growing_score)
        if len(heads := np.flatnonzero(close)):  # forecasts of the others would only cost time
            drifts, evident, newest = drift[heads] >= 1.0, capital[heads] >= asked, latest[heads]
            supported[heads] = drifts & evident
            ahead, longest = courses(growth, heads), config.horizon_windows or math.inf
            known = dict(zip(heads.tolist(), ahead.tolist(), strict=True))
            windows = np.stack([np.where(supported[heads], longest, longest / 3), np.ones(len(heads))])
            near = np.fmin(ratios[:, heads], windows * growth.steps / ahead)  # unchanged if the score is unknown
            may_show = drifts & ~evident & (capital[heads] >= _WORTH_A_LOOK) & (bias.bets[0, heads] > 0)
            undecided = bool((may_show & ~(ahead > longest * growth.steps)).any())
            high = (newest >= DANGEROUS_SCORE) & ~(newest < score_before[heads])
            near[HeadSignal.SCORE] = np.fmax(near[HeadSignal.SCORE], newest / DANGEROUS_SCORE * high)
            ratios[:, heads] = near
            soon = min(config.persist_blocks * config.block_steps, growth.steps)
            urgent = heads[high | ((newest >= config.growing_score) & (ahead < soon))]
        return cls(growth, rounds, won, asked, supported, ratios, urgent, known, undecided)

    def evidence(self, head: int) -> float:
        """Return the capital of the head's bets, divided by the capital that supports a drift."""
        tests = self.rounds[head] and not self.growth.start[HeadSignal.SCORE, head] >= DANGEROUS_SCORE
        return float(self.won[head] * tests / self.asked)

    def refutes(self, head: int) -> bool:
        """Whether the delta bias is applied and is evidence against a drift in the direction of the offset."""
        return bool(self.rounds[head] and self.won[head] < 1.0)

    def course(self, head: int) -> float:
        """Return the forecast steps until the head's score is dangerous (forecast.py)."""
        return self.ahead[head] if head in self.ahead else float(courses(self.growth, np.array([head]))[0])

    def dangerous(self, head: int) -> bool:
        """Whether the score of this head is dangerous."""
        return bool(self.growth.end[HeadSignal.SCORE, head] >= DANGEROUS_SCORE)
