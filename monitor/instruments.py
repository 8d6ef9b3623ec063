"""What stands in a watched model."""

from dataclasses import dataclass

from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor.attention.keep_attention import Keeper
from foreshock.monitor.model.layers import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What `attach` put into the model. `state` int64 [N, SLOT_COUNT] and `modes` int32 [N] lie on its device."""

    state: Tensor
    modes: Tensor
    layers: tuple[wire.Layer, ...]
    watched: tuple[nn.Module, ...]
    projections: tuple[Projection | None, ...]
    report: str
    keeper: Keeper | None = None
    """Who serves each layer; None in tests without a model."""
    unwatched: int = 0
    """Attention modules that were found and cannot be watched."""
