"""When a head is warned about: every threshold of the detectors."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


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
    """Healthy heads grow while fewer steps than this are held."""
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
    bare_horizon_windows: ClassVar[float] = 2.0
    """`horizon_windows` of such a drift."""
    growing_score: ClassVar[float] = 256.0
    """Largest |score| from which on fast growth is warned about, and a supported drift is critical."""
    overflow_steps: ClassVar[int] = 50
    """Steps in a row whose gradients overflow beside a finite loss before it is critical: a GradScaler skips them."""
    update_steps: ClassVar[int] = 1000
    """An active verdict is updated after this many steps."""
