"""Spectral norms of every head of a model, laid out in the order of a sample's heads."""

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from foreshock.contract.wire import Layer
from foreshock.kernels.spectral import SpectralNorms
from foreshock.monitor.layers import Projection, ShardedWeightError

NORM_NAMES: Final = ("query_norm", "key_norm", "query_key_norm")


class ModelNorms:
    """Follows W_Q, W_K and W_Q W_K^T of every layer whose weights this process holds whole."""

    def __init__(self, layers: Sequence[Layer], projections: Sequence[Projection | None]) -> None:
        sizes = [len(layer.heads) for layer in layers]
        starts = itertools.accumulate(sizes, initial=0)
        self._total = sum(sizes)
        self._layers = [
            (range(start, start + size), projection)
            for start, size, projection in zip(starts, sizes, projections, strict=False)
            if projection is not None
        ]
        self._followers: dict[object, tuple[SpectralNorms, Tensor]] = {}

    def measure(self) -> dict[str, Tensor]:
        """The norms now, by name, each float32 [N] on the weights' device, NaN where unmeasured; {} when all are."""
        groups: dict[object, list[tuple[range, Tensor, Tensor]]] = {}
        for rows, projection in self._layers:
            try:
                query, key = projection.read()
            except ShardedWeightError:
                continue
            if query.numel() and key.numel():
                groups.setdefault((query.shape, key.shape, query.device), []).append((rows, query, key))
        if not groups:
            return {}
        device = next(iter(groups.values()))[0][1].device
        measured = torch.full((len(NORM_NAMES), self._total), float("nan"), device=device)
        for shape, group in groups.items():
            follower, index = self._follower((shape, len(group)), [rows for rows, _, _ in group], device)
            norms = follower([query for _, query, _ in group], [key for _, _, key in group])
            measured[:, index] = torch.stack([n.flatten() for n in norms]).to(device)
        return dict(zip(NORM_NAMES, measured.unbind(), strict=True))

    def _follower(self, group: object, rows: Sequence[range], device: torch.device) -> tuple[SpectralNorms, Tensor]:
        if group not in self._followers:
            index = torch.tensor([row for span in rows for row in span], device=device)
            self._followers[group] = SpectralNorms(), index
        return self._followers[group]
