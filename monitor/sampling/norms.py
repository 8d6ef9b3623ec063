"""Spectral norms of every head of a model, laid out in the order of a sample's heads."""

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.contract.wire import Layer
from foreshock.kernels.spectral import SpectralNorms, head_grams
from foreshock.monitor.model.layers import Held, Projection, ShardedWeightError
from foreshock.monitor.sampling.grams import GramPart, gram_part

NORM_NAMES: Final = ("query_norm", "key_norm", "query_key_norm")


class _Shape(NamedTuple):
    """What layers must share to be followed together."""

    heads: int
    kv_heads: int
    head_dim: int
    held: range
    """The query heads held whole."""
    kv_held: range


class Measured(NamedTuple):
    """What could be told of the weights at one step."""

    norms: dict[str, Tensor]
    """By name, each float32 [N] on the weights' device, NaN where unmeasured; {} when all are."""
    parts: tuple[GramPart, ...] = ()
    """Of the layers whose inputs are spread over processes: this process's share of their Gram matrices."""


class ModelNorms:
    """Follows W_Q, W_K and W_Q W_K^T of every head whose rows this process holds whole."""

    def __init__(self, layers: Sequence[Layer], projections: Sequence[Projection | None]) -> None:
        sizes = [len(layer.heads) for layer in layers]
        starts = itertools.accumulate(sizes, initial=0)
        self._total = sum(sizes)
        self._layers = [
            (start, layer, projection)
            for start, layer, projection in zip(starts, layers, projections, strict=False)
            if projection is not None
        ]
        self._followers: dict[object, _Follower] = {}
        self._adding_up: dict[int, bool] = {}

    def measure(self) -> Measured:
        """The norms now, and parts of the Gram matrices of which this process holds not all inputs."""
        parts: list[GramPart] = []
        groups: dict[_Shape, list[tuple[int, Tensor, Tensor]]] = {}
        for start, layer, projection in self._layers:
            try:
                query, key = projection.query.read(), projection.key.read()
            except ShardedWeightError:
                continue
            if query.whole_inputs and key.whole_inputs and (query.heads or key.heads):
                heads, kv_heads = len(projection.query.starts), len(projection.key.starts)
                shape = _Shape(heads, kv_heads, projection.query.head_dim, query.heads, key.heads)
                # weights become Gram matrices layer by layer: where they are gathered, only one layer's are at a time
                groups.setdefault(shape, []).append((start, _grams(query, heads), _grams(key, kv_heads)))
            elif self._sends(start, projection) and query.inputs[0] < query.inputs[1]:
                parts.append(gram_part(layer, query, key))
        return Measured(self._follow(groups), tuple(parts))

    def _sends(self, start: int, projection: Projection) -> bool:
        """Whether this process is the one that sends its part of the layer that starts there; told once."""
        if start not in self._adding_up:
            self._adding_up[start] = projection.adds_up and projection.query.is_first_replica()
        return self._adding_up[start]

    def _follow(self, groups: dict[_Shape, list[tuple[int, Tensor, Tensor]]]) -> dict[str, Tensor]:
        if not groups:
            return {}
        device = next(iter(groups.values()))[0][1].device
        measured = torch.full((len(NORM_NAMES), self._total), float("nan"), device=device)
        for shape, group in groups.items():
            starts = tuple(start for start, _, _ in group)
            if (shape, starts) not in self._followers:
                self._followers[shape, starts] = _Follower(shape, starts, device)
            follower = self._followers[shape, starts]
            measured[:, follower.index] = follower(
                torch.stack([query for _, query, _ in group]), torch.stack([key for _, _, key in group])
            )
        return dict(zip(NORM_NAMES, measured.unbind(), strict=True))


def _grams(held: Held, heads: int) -> Tensor:
    """W W^T of all heads, [heads, D, D]: zero for those that are not held."""
    if len(held.heads) == heads:
        return head_grams([held.weights])[0]
    dim = held.weights.shape[1]
    grams = torch.zeros(heads, dim, dim, device=held.weights.device)
    if held.heads:
        grams[held.heads.start : held.heads.stop] = head_grams([held.weights])[0]
    return grams


class _Follower:
    """The norms of some layers of one shape, from call to call."""

    def __init__(self, shape: _Shape, starts: Sequence[int], device: torch.device) -> None:
        self._norms = SpectralNorms()
        self.index = torch.tensor([start + head for start in starts for head in range(shape.heads)], device=device)
        """Where the layers' heads stand in a sample."""
        group = shape.heads // shape.kv_heads
        known = [
            [head in shape.held, head // group in shape.kv_held, head in shape.held and head // group in shape.kv_held]
            for head in range(shape.heads)
        ]
        everything = all(map(all, known))
        self._known = None if everything else torch.tensor(known, device=device).t().repeat(1, len(starts))

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Norms of query [layers, H, D, D] and key [layers, Hkv, D, D] Gram matrices, [3, layers * H]."""
        norms = torch.stack([norm.flatten() for norm in self._norms.of_grams(query, key)])
        return norms if self._known is None else torch.where(self._known, norms, float("nan"))
