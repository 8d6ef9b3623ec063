"""The weight that a projection computes with, where it can be read without running code of the model."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from foreshock.monitor.model.sharding import is_sharded, is_wrapped

_PURE: Final[tuple[type, ...]] = tuple(
    kind for name in ("_WeightNorm", "_Orthogonal") if isinstance(kind := getattr(parametrizations, name, None), type)
)
"""PyTorch's parametrizations that neither write nor draw anything; its spectral norm goes on at every reading."""


def stored(module: nn.Module, name: str = "weight") -> Any:
    """The tensor of this name, or None where a property computes it: reading that would run code of the model, which
    may write or draw numbers, or give the weight under adapters."""
    for held in (module._parameters, module._buffers, vars(module)):
        if name in held:
            return held[name]
    if not parametrize.is_parametrized(module, name):
        return None
    makers: Any = module.parametrizations[name]  # type: ignore[index]
    # called past the property: inside `parametrize.cached()` that would keep our result for the model's own forward
    return makers() if all(isinstance(maker, _PURE) for maker in makers) else None


def device_of(*modules: nn.Module) -> torch.device:
    """Where the first parameter of these modules lies; the CPU without one that has numbers."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    return next((each.device for each in parameters if not each.is_meta), torch.device("cpu"))


def why_unread(projection: nn.Module) -> str | None:
    """Why the weight that a projection computes with cannot be read; None where it can, or where it has none."""
    if has_adapters(projection):
        return "which has adapters"
    if stored(projection) is None and (hasattr(type(projection), "weight") or "base_layer" in projection._modules):
        return "whose weight is computed anew at every reading"
    return None


def computes_otherwise(module: nn.Module) -> bool:
    """Whether the projection has a forward of its own, which may scale or round its weight."""
    return getattr(module.forward, "__func__", None) is not nn.Linear.forward and not is_conv1d(module)


def change_by_weight(module: nn.Module, inputs: Any, outputs: Tensor) -> tuple[Tensor, Tensor] | None:
    """How much the outputs [..., out] of the first and the last token differ, and how much they should by the weight,
    each [out]; None where inputs [..., in] or weight are not to be had."""
    weight = stored(module)
    known = isinstance(weight, Tensor) and type(inputs) is Tensor and not is_sharded(weight) and not is_wrapped(weight)
    if not known or inputs.shape[:-1] != outputs.shape[:-1] or weight.shape != (outputs.shape[-1], inputs.shape[-1]):
        return None
    given, change = (x.detach().flatten(0, -2)[[0, -1]].float().diff(dim=0)[0] for x in (inputs, outputs))
    with torch.autocast(given.device.type, enabled=False):
        return change, weight.detach().float() @ given


def has_adapters(module: object) -> bool:
    """Whether the projection has low-rank adapters, as those of peft, torchtune, loralib and most hand-made ones."""
    return hasattr(module, "lora_A") or hasattr(module, "lora_a")


def base_of(module: nn.Module) -> nn.Module:
    """The projection under the adapters; the module itself where it keeps the weight or has no adapters."""
    if has_adapters(module):
        for name in ("base_layer", "linear", "base"):
            if isinstance(base := getattr(module, name, None), nn.Module):
                return base
    return module


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, which keeps its weight as [in, out]; nn.Linear keeps [out, in]."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
