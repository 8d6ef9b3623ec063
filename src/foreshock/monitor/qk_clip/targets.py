"""Which layers QK-Clip may scale: whose largest score is known exactly, and whose weights are the optimizer's own."""

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from foreshock.monitor.attention.backend_selector import BackendSelector
from foreshock.monitor.attention.layout_proof import LayoutProof
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.model.layers import Projection
from foreshock.monitor.qk_clip.scaling import parameters_of

_COPIED: Final = ("main_param", "_hp_mapping", "ds_id")
"""What Megatron and DeepSpeed put on a parameter whose master copy the optimizer owns."""


def projection_of(
    layer: WatchedLayer, layout: LayoutProof, selector: BackendSelector, optimizers: Sequence[Any]
) -> Projection | str:
    """Where the weights of a layer lie, or why it is not scaled."""
    if layer.sampled and (why := selector.why_not_in_full(layer)) is not None:
        return why
    if layer.unserved:
        return f"some of its calls are not watched ({next(iter(layer.unserved))})"
    found = layout.scalable()
    if isinstance(found, str):
        return found
    for parameter in parameters_of(found):
        if (why := _why_not_owned(parameter, optimizers)) is not None:
            return why
    return found


def _why_not_owned(parameter: nn.Parameter, optimizers: Sequence[Any]) -> str | None:
    if not optimizers:
        if parameter.element_size() > 2 and not any(hasattr(parameter, name) for name in _COPIED):
            return None
        dtype = str(parameter.dtype).removeprefix("torch.")
        return (
            f"its weights are {dtype} and may be copies of an optimizer's own; where they are not, "
            "agent.qk_clip_with(optimizer=...) shows it"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    owned = any(parameter is own for group in groups for own in group["params"])
    masters = any("master" in str(key) for one in optimizers for key in one.state.get(parameter, {}))
    return None if owned and not masters else "the optimizer trains a copy of its weights, which would undo it"
