"""Which part of a weight this process holds, read off a DTensor's placements: no collective is needed for it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


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
