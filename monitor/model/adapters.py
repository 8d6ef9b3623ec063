"""The weight that a projection really computes with: its own, or with low-rank adapters W + scale * B A.

Known are peft's layout (a `base_layer`, and `lora_A`, `lora_B`, `scaling` by adapter name), torchtune's (linear layers
`lora_a`, `lora_b`) and the one of loralib and most hand-made ones (`lora_A`, `lora_B`, parameters or linear layers).
"""

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from foreshock.monitor.model.sharding import is_sharded

_PURE: Final[tuple[type, ...]] = tuple(
    kind for name in ("_WeightNorm", "_Orthogonal") if isinstance(kind := getattr(parametrizations, name, None), type)
)
"""PyTorch's parametrizations that neither write nor draw anything; its spectral norm goes on at every reading."""


def stored(module: nn.Module, name: str = "weight") -> Any:
    """The tensor of this name, or None where a property computes it: reading that would run code of the model, which
    may write or draw numbers, or give the weight under adapters of an unknown kind."""
    for held in (module._parameters, module._buffers, vars(module)):
        if name in held:
            return held[name]
    if not parametrize.is_parametrized(module, name):
        return None
    makers = module.parametrizations[name]  # type: ignore[index]
    return getattr(module, name) if all(isinstance(maker, _PURE) for maker in makers) else None


def why_unread(projection: nn.Module) -> str | None:
    """Why the weight that a projection computes with cannot be told; None where it can, or where it has none."""
    if has_adapters(projection):
        return "whose adapters are of an unknown kind" if adapted(projection) is None else None
    if stored(projection) is None and (hasattr(type(projection), "weight") or "base_layer" in projection._modules):
        return "whose weight is computed anew at every reading"
    return None


def computes_otherwise(module: nn.Module) -> bool:
    """Whether the projection has a forward that is not known here, which may scale or round its weight."""
    projection = base_of(module)
    known = type(projection).forward is nn.Linear.forward or is_conv1d(projection) or has_adapters(projection)
    return not known


def has_adapters(module: object) -> bool:
    """Whether the projection has low-rank adapters, in a layout known here or not."""
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


def adapted(module: nn.Module) -> Tensor | None:
    """The effective weight as [out, in], or None where it cannot be told (another layout, DoRA, sharded weights)."""
    base = base_of(module)
    weight = stored(base)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or is_sharded(weight) or _is_dora(module):
        return None
    effective = weight.detach().t() if is_conv1d(base) else weight.detach()
    try:
        adapters = list(_active(module))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    for down, up, scale in adapters:
        if is_sharded(down) or is_sharded(up):
            return None
        down, up = down.detach().float(), up.detach().float()
        if (up.shape, down.shape) == ((effective.shape[0], len(down)), (up.shape[-1], effective.shape[1])):
            effective = effective.float() + scale * (up @ down)
        elif (up.shape, down.shape) == ((down.shape[-1], effective.shape[0]), (effective.shape[1], len(up))):
            effective = effective.float() + scale * (down @ up).t()  # written as x A B
        else:
            return None
    return effective


def _is_dora(module: Any) -> bool:
    used = getattr(module, "use_dora", False)
    return any(used.values()) if isinstance(used, dict) else bool(used)


def _active(module: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """A, B and scale of each adapter that is on and not merged into the weight; raises what a strange layout raises."""
    if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
        if not module.disable_adapters:
            for name in module.active_adapters:
                if name in module.lora_A and name not in module.merged_adapters:
                    yield module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name])
    elif not getattr(module, "merged", False) and not getattr(module, "disabled", False):
        small = "a" if hasattr(module, "lora_a") else "A"
        down, up = getattr(module, f"lora_{small}"), getattr(module, "lora_b" if small == "a" else "lora_B")
        yield getattr(down, "weight", down), getattr(up, "weight", up), _scale(module)


def _scale(module: Any) -> float:
    for name in ("scaling", "scale"):
        if hasattr(module, name):
            return float(getattr(module, name))
    alpha = module.alpha if hasattr(module, "alpha") else module.lora_alpha
    return float(alpha / (module.rank if hasattr(module, "rank") else module.r))
