"""When a head is warned about: every threshold of the detectors."""

from statistics import NormalDist
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class DetectorConfig(BaseModel):
    """When a head is warned about. Every threshold can be read in the evidence of a verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    earliest_steps: int = Field(
        default=500, ge=0, description="no growth is judged before this step, nor while the learning rate rises"
    )
    window_steps: int = Field(default=4000, ge=100, description="longest past that growth is measured over")
    block_steps: int = Field(
        default=100, ge=1, description="samples are joined into blocks of at most this many steps, or of one sample"
    )
    persist_blocks: int = Field(default=3, ge=1, description="blocks in a row in which a signal must trigger")
    quiet_steps: int = Field(default=2000, ge=1, description="steps without a trigger after which a verdict clears")
    offset_level: float = Field(default=3.0, gt=0, description="|offset| (nats) below which no drift is warned about")
    score_level: float = Field(
        default=256.0,
        gt=0,
        description="largest |score| below which its growth is no warning; twice that for a head that sharpens. For a "
        "drift that no delta bias supports it is twice that at the first step, and falls evenly until step 5000. "
        "From here on a drift that the delta bias supports is critical",
    )
    horizon_run_multiple: float | None = Field(
        default=3.0,
        gt=0,
        description="a head is warned about only if its forecast lies within this many times the run's life so far; "
        "null: however far off it is",
    )

    # What nobody has a reason to set.
    settle_steps: ClassVar[int] = 5000
    """Healthy heads grow in a run younger than this."""
    young_growth: ClassVar[float] = 3.0
    """Factor that 1 + |offset| grew by, asked at the first step; it falls evenly to none at `settle_steps`."""
    offset_change: ClassVar[float] = 1.5
    """Change of the offset (nats) over the window."""
    support_chance: ClassVar[float] = 0.05
    """Chance that noise alone makes the delta bias of any head support a drift and name rounding: 2.5 standard errors
    for 8 heads, 3.4 for 144."""
    shared_part: ClassVar[float] = 0.25
    """Least part of what a head's largest |score| grew by that its offset must have moved by for its scores to move
    together; a head whose scores spread instead sharpens, which is no drift."""
    far_offset: ClassVar[float] = 10.0
    """|offset| (nats) from which on a forecast may have a latest step."""
    overflow_steps: ClassVar[int] = 50
    """Steps in a row whose gradients overflow beside a finite loss before it is critical: a GradScaler skips them."""
    update_steps: ClassVar[int] = 1000
    """An active verdict is updated after this many steps."""

    def support_z(self, heads: int) -> float:
        """The standardised delta bias that supports a drift, where one of `heads` heads may reach it by noise."""
        return -NormalDist().inv_cdf(self.support_chance / max(heads, 1))
