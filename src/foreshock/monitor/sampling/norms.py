"""Spectral norms of every head of a model, laid out in the order of a sample's heads."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foreshock.contract.wire import Layer
from foreshock.kernels.spectral import SpectralNorms, head_grams
from foreshock.monitor.model.layers import Held, Projection, UnreadableWeightError

NORM_NAMES: Final = ("query_norm", "key_norm", "query_key_norm")


class _Shape(NamedTuple):
    """What layers must share to be followed together."""

    heads: int
    kv_heads: int
    head_dim: int
    held: range
    """The query heads held whole."""
    kv_held: range


_Groups = dict[tuple[_Shape, torch.device], list[tuple[int, Tensor, Tensor]]]
"""By shape and device: where a layer's heads stand in a sample, and their Gram matrices of query and key."""


class ModelNorms:
    """Follows W_Q, W_K and W_Q W_K^T of every head whose rows this process holds whole."""

    def __init__(self, layers: Sequence[Layer], projections: Sequence[Callable[[], Projection | None]]) -> None:
        """`projections` give where each layer's weights lie at a reading, or None where it is unknown."""
        sizes = [len(layer.heads) for layer in layers]
        starts = itertools.accumulate(sizes, initial=0)
        self._total = sum(sizes)
        self._layers = list(zip(starts, projections, strict=False))
        self._followers: dict[object, _Follower] = {}

    def measure(self) -> dict[str, Tensor]:
        """The norms now: by name, each float32 [N] on the weights' device, NaN where unmeasured; {} when all are."""
        groups: _Groups = {}
        for start, located in self._layers:
            if (projection := located()) is None:
                continue
            try:
                query, key = projection.query.read(), projection.key.read()
            except UnreadableWeightError:
                continue
            if query.whole_inputs and key.whole_inputs and (query.heads or key.heads):
                heads, kv_heads = len(projection.query.starts), len(projection.key.starts)
                shape = _Shape(heads, kv_heads, projection.query.head_dim, query.heads, key.heads)
                # weights become Gram matrices layer by layer: where they are gathered, only one layer's are at a time
                own = groups.setdefault((shape, query.weights.device), [])
                own.append((start, _grams(query, heads), _grams(key, kv_heads)))
        return self._follow(groups)

    def _follow(self, groups: _Groups) -> dict[str, Tensor]:
        if not groups:
            return {}
        device = next(iter(groups))[1]
        measured = torch.full((len(NORM_NAMES), self._total), float("nan"), dtype=torch.float32, device=device)
        for (shape, _), group in groups.items():
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
        return head_grams(held.weights)
    dim = held.weights.shape[1]
    grams = torch.zeros(heads, dim, dim, dtype=torch.float32, device=held.weights.device)
    if held.heads:
        grams[held.heads.start : held.heads.stop] = head_grams(held.weights)
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
        norms = torch.stack([norm.flatten() for norm in self._norms(query, key)]).to(self.index.device)
        return norms if self._known is None else torch.where(self._known, norms, float("nan"))
