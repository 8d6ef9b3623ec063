"""Gram matrices of heads whose inputs a shard cuts: a process has no norm of them, the service adds the parts up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foreshock.contract import wire
from foreshock.kernels.spectral import head_grams
from foreshock.monitor.model.layers import Held


@dataclass(frozen=True, slots=True)
class GramPart:
    """W W^T of a layer's query heads and then of its key heads, over the inputs [start, stop) of `all_inputs`."""

    layer: wire.Layer
    kv_heads: int
    head_dim: int
    inputs: tuple[int, int]
    all_inputs: int
    triangles: Tensor
    """float32 [heads + kv_heads, D (D + 1) / 2], upper triangles row by row; on the weights' device, then the host."""


def gram_part(layer: wire.Layer, query: Held, key: Held) -> GramPart:
    """What this process adds to the sums of a layer of which it holds all heads, and one part of the inputs."""
    grams = torch.cat([head_grams([query.weights])[0], head_grams([key.weights])[0]])
    dim = grams.shape[-1]
    row, column = torch.triu_indices(dim, dim, device=grams.device)
    return GramPart(layer, len(key.heads), dim, query.inputs, query.all_inputs, grams[:, row, column])
