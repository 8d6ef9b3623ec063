"""Spectral norms of W_Q, W_K and W_Q W_K^T of every head."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from foreshock.contract.wire import Layer
from foreshock.kernels.spectral import SpectralNorms, head_grams
from foreshock.monitor.model.layers import Held, Projection, UnreadableWeightError

NORM_NAMES: Final = ("query_norm", "key_norm", "query_key_norm")


class ModelNorms:
    """Tracks the norms of W_Q, W_K and W_Q W_K^T of every head whose rows are complete in this process."""

    def __init__(self, layers: Sequence[Layer], projections: Sequence[Callable[[], Projection | None]]) -> None:
        """projections: for each layer, a function that returns the location of its weights, or None if unknown."""
        sizes = [len(layer.heads) for layer in layers]
        starts = itertools.accumulate(sizes, initial=0)
        self._total = sum(sizes)
        self._layers = list(zip(starts, projections, strict=False))
        self._followers: dict[object, tuple[SpectralNorms, Tensor]] = {}
        """By the layers' common shape and their positions: the object that tracks them, and the rows of their heads."""

    def measure(self) -> dict[str, Tensor]:
        """Return the norms by name, each float32 [N] on the weights' device; NaN if not measured, {} if none are."""
        groups: dict[tuple[torch.Size, torch.Size, torch.device], list[tuple[int, Tensor, Tensor]]] = {}
        for start, located in self._layers:
            if (projection := located()) is None:
                continue
            try:
                sides = [(side.read(), len(side.starts)) for side in (projection.query, projection.key)]
            except UnreadableWeightError:
                continue
            if any(held.heads for held, _ in sides):
                # Gram matrices are formed layer by layer, so that only one layer's sharded weights are gathered at once
                query, key = (_grams(*side) for side in sides)
                groups.setdefault((query.shape, key.shape, query.device), []).append((start, query, key))
        if not groups:
            return {}
        device = next(iter(groups))[2]
        measured = torch.full((len(NORM_NAMES), self._total), float("nan"), dtype=torch.float32, device=device)
        for shape, group in groups.items():
            starts, queries, keys = zip(*group, strict=True)
            if (shape, starts) not in self._followers:
                rows = [start + head for start in starts for head in range(len(queries[0]))]
                self._followers[shape, starts] = SpectralNorms(), torch.tensor(rows, device=device)
            norms, index = self._followers[shape, starts]
            both = norms(torch.stack(queries), torch.stack(keys))
            measured[:, index] = torch.stack([norm.flatten() for norm in both]).to(device)
        return dict(zip(NORM_NAMES, measured.unbind(), strict=True))


def _grams(held: Held, heads: int) -> Tensor:
    """Return W W^T of all heads, [heads, D, D]; NaN for heads that are not in this process, which have norm NaN."""
    dim = held.weights.shape[1]
    grams = torch.full((heads, dim, dim), float("nan"), dtype=torch.float32, device=held.weights.device)
    if held.heads:
        grams[held.heads.start : held.heads.stop] = head_grams(held.weights)
    return grams
