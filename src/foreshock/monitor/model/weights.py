"""The weight that a projection computes with, where it can be read without running code of the model.

Which part of it this process holds is read off a DTensor's placements: no collective is needed for it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Part(NamedTuple):
    """Rows and columns [start, stop) of a weight."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def is_sharded(weight: object) -> bool:
    """Whether the weight is a DTensor, of which a process holds a part."""
    return hasattr(weight, "device_mesh") and hasattr(weight, "placements")


def is_wrapped(weight: Tensor) -> bool:
    """Whether the weight only stands for numbers that are kept otherwise, as a quantised one, and is no DTensor."""
    return not is_sharded(weight) and type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__


def part_of(weight: Any, mesh_dims: Sequence[int] | None = None, coordinate: Sequence[int] | None = None) -> Part:
    """What the process at `coordinate` of the mesh, this one by default, holds of a DTensor of two dimensions.

    `mesh_dims` limits it to the shards over those dimensions of the mesh.
    """
    rows, columns = spans_of(weight, mesh_dims, coordinate)
    return Part(rows, columns)


def spans_of(
    weight: Any, mesh_dims: Sequence[int] | None = None, coordinate: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """The same for a DTensor of any dimensions: [start, stop) in each of them, cut as torch.chunk cuts it."""
    mesh, placements = weight.device_mesh, weight.placements
    where = _coordinate(mesh) if coordinate is None else coordinate
    spans = [(0, int(size)) for size in weight.shape]
    dims = range(len(placements)) if mesh_dims is None else mesh_dims
    # FSDP's shard of a tensor-parallel weight stands to the left, but was cut last; PyTorch marks it so
    for dim in sorted(dims, key=lambda d: hasattr(placements[d], "split_factor")):
        cut: int | None = getattr(placements[dim], "dim", None)
        if where is None:
            return [(0, 0)] * len(spans)
        if cut is not None:
            start, stop = spans[cut]
            size = -(-(stop - start) // mesh.size(dim))
            spans[cut] = (min(start + where[dim] * size, stop), min(start + (where[dim] + 1) * size, stop))
    return spans


def _coordinate(mesh: Any) -> Sequence[int] | None:
    """Where this process stands in the mesh; None outside it."""
    found = (mesh.mesh == torch.distributed.get_rank()).nonzero().tolist()
    return found[0] if found else None


def parts_of(weight: Any) -> Iterator[Part]:
    """What each process of the mesh holds of a DTensor of two dimensions."""
    for coordinate in itertools.product(*(range(weight.device_mesh.size(d)) for d in range(len(weight.placements)))):
        yield part_of(weight, coordinate=coordinate)


def tensor_parallel_dims(weight: Any, *, under_fsdp: bool) -> list[int]:
    """The mesh dimensions over which a DTensor is computed with in parts, not only stored in parts.

    FSDP gathers a weight before it is used. Its own dimensions stand first: a replicated one, if any, then a sharded.
    """
    placements = weight.placements
    first = 0
    if under_fsdp:
        first = next((d for d, placement in enumerate(placements) if hasattr(placement, "dim")), len(placements)) + 1
    return [d for d in range(first, len(placements)) if hasattr(placements[d], "dim")]


def under_fsdp(model: nn.Module, name: str) -> bool:
    """Whether FSDP2 (`fully_shard`) wraps the module of this name or one round it."""
    from torch.distributed.fsdp import FSDPModule

    owners = [model]
    for part in name.split(".") if name else ():
        owners.append(owners[-1].get_submodule(part))
    return any(isinstance(owner, FSDPModule) for owner in owners)


def local_tensor(weight: Any) -> Tensor:
    """The part of a weight that this process holds, without its history."""
    held: Tensor = weight.to_local() if is_sharded(weight) else weight
    return held.detach()


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
        return "whose weight is computed again at every reading"
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
