"""When a head is warned about: every threshold of the detectors."""

from statistics import NormalDist

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class DetectorConfig(BaseModel):
    """When a head is warned about. Every threshold can be read in the evidence of a verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    earliest_steps: int = Field(
        default=500, ge=0, description="no growth is judged before this step, nor before twice the learning rate's rise"
    )
    settle_steps: int = Field(
        default=5000,
        ge=0,
        description="healthy heads grow in a run younger than this: what is asked of the growth of 1 + |offset| falls "
        "evenly from young_growth at the first step to none here",
    )
    young_growth: float = Field(
        default=3.0, gt=1, description="least growth factor of 1 + |offset| that is asked at the first step"
    )
    window_steps: int = Field(default=4000, ge=100, description="longest past that growth is measured over")
    block_steps: int = Field(
        default=100, ge=1, description="samples are joined into blocks of at most this many steps, or of one sample"
    )
    persist_blocks: int = Field(default=3, ge=1, description="blocks in a row in which a signal must trigger")
    quiet_steps: int = Field(default=2000, ge=1, description="steps without a trigger after which a verdict clears")
    offset_level: float = Field(default=3.0, gt=0, description="|offset| (nats) below which no drift is warned about")
    support_chance: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="chance that noise alone makes the delta bias of any head support a drift and name rounding: "
        "2.5 standard errors for 8 heads, 3.4 for 144",
    )
    shared_part: float = Field(
        default=0.25,
        ge=0,
        description="least part of what a head's largest |score| grew by that its offset must have moved by for its "
        "scores to move together; a head whose scores spread instead sharpens, which is no drift",
    )
    far_offset: float = Field(
        default=10.0,
        gt=0,
        validation_alias=AliasChoices("far_offset", "unsupported_level"),
        description="|offset| (nats) that is far for any head: from here on heads of one layer that drift together are "
        "no comfort, and a forecast may have a latest step. Its old name, unsupported_level, is still read",
    )
    offset_change: float = Field(default=1.5, gt=0, description="change of the offset (nats) over the window")
    score_level: float = Field(
        default=256.0,
        gt=0,
        description="largest |score| below which its growth is no warning; twice that for a head that sharpens. For a "
        "drift that no delta bias supports it is twice that at the first step, and falls evenly until settle_steps. "
        "From here on a drift that the delta bias supports is critical",
    )
    norm_growth: float = Field(default=4.0, gt=1, description="factor by which the norm of W_Q grew")
    peer_excess: float = Field(
        default=1.5, ge=0, description="a head must grow by so many times what its peers grow by"
    )
    share_of_newer_half: float = Field(default=0.45, ge=0, le=1, description="of the change; a line has 0.5, a stop 0")
    noise_multiple: float = Field(default=4.0, ge=0, description="change in units of its own standard error")
    horizon_lives: float | None = Field(
        default=3.0,
        gt=0,
        description="a head is warned about only if its forecast lies within so many times the run's life so far; "
        "null: however far off it is",
    )
    tied_share: float = Field(default=0.3, gt=0, le=1, description="share of rows with several maxima")
    tied_growth: float = Field(default=3.0, gt=1, description="factor by which that share grew")
    unrest: float = Field(
        default=0.1, gt=0, description="rise of the loss above its lowest block, as a share, that comes from elsewhere"
    )
    overflow_steps: int = Field(
        default=50,
        ge=0,
        description="steps in a row whose gradients overflow beside a finite loss before it is critical: a GradScaler "
        "skips them while it halves its scale",
    )
    update_steps: int = Field(default=1000, ge=1, description="an active verdict is told again after this many steps")

    def support_z(self, heads: int) -> float:
        """The standardised delta bias that supports a drift, where one of so many heads may reach it by noise."""
        return -NormalDist().inv_cdf(self.support_chance / max(heads, 1))
