"""Flash attention that counts statistics of its own scores and rounding errors."""

from foreshock.kernels.flash_attention.op import flash_attention
from foreshock.kernels.flash_attention.spec import AttentionSpec, CausalAlignment, Numerics
from foreshock.kernels.flash_attention.statistics import new_state

__all__ = ["AttentionSpec", "CausalAlignment", "Numerics", "flash_attention", "new_state"]
