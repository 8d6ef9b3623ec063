"""Spectral norms of W_Q, W_K and W_Q W_K^T for every head of every layer, by power iteration from where it last stood.

Weights move little between two calls, so a step or two each time keeps up with them; only the first call iterates
longer. An iteration reads every weight twice and forms no [d_model, d_model] matrix. There is no host synchronisation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class HeadNorms(NamedTuple):
    """Spectral norms, each float32 [layers, H]. Power iteration comes from below: no norm is overstated."""

    query: Tensor
    key: Tensor
    """Of the key head that the query head reads."""
    query_key: Tensor
    """Of the map from two token vectors to their score before scaling; in the paper's notation W_Q W_K^T."""


class _Vectors(NamedTuple):
    """Unit vectors near the leading singular vectors, float32."""

    query: Tensor
    """Of W_Q, on its head_dim side, [layers, H, D]."""
    key: Tensor
    """Of W_K, on its d_model side, [layers, Hkv, d_model]."""
    query_key: Tensor
    """Of the score's map, on the key's side, [layers, H, d_model]."""


class SpectralNorms:
    """Follows the spectral norms of layers that share one shape; keep one object for each group of such layers.

    cold_iterations are made in the first call, when nothing is known; warm_iterations in every later one. Within 3 % of
    the true norm on random matrices, whose leading values lie close together, and much nearer where one stands out.
    """

    def __init__(self, *, cold_iterations: int = 64, warm_iterations: int = 2) -> None:
        if min(cold_iterations, warm_iterations) < 1:
            raise ValueError(f"iterations are {cold_iterations} cold, {warm_iterations} warm; each must be 1 or more")
        self._cold_iterations = cold_iterations
        self._warm_iterations = warm_iterations
        self._vectors: _Vectors | None = None

    @torch.no_grad()
    def __call__(self, query_weights: Sequence[Tensor], key_weights: Sequence[Tensor]) -> HeadNorms:
        """Advance the iteration by one call and return the norms.

        query_weights are the layers' [H, D, d_model], key_weights their [Hkv, D, d_model], as nn.Linear holds them
        (query = W x). Float32 views, also transposed ones, are read where they lie; other types are converted first.
        Raises ValueError when shapes disagree among the layers or with the first call.
        """
        _check(query_weights, key_weights)
        vectors, iterations = self._vectors, self._warm_iterations
        if vectors is None:
            vectors, iterations = _start(query_weights, key_weights), self._cold_iterations
        layers, heads, head_dim = vectors.query.shape
        known = [layers, heads, vectors.key.shape[1], head_dim, vectors.key.shape[2]]
        given = [len(query_weights), len(query_weights[0]), *key_weights[0].shape]
        if given != known:
            raise ValueError(f"[layers, H, Hkv, D, d_model] was {known} and is now {given}; keep one object for each")
        query, key = ([weight.float() for weight in weights] for weights in (query_weights, key_weights))
        for _ in range(iterations):
            vectors, norms = _iterate(query, key, vectors)
        self._vectors = vectors
        return norms


def _check(query_weights: Sequence[Tensor], key_weights: Sequence[Tensor]) -> None:
    shapes = {(tuple(q.shape), tuple(k.shape)) for q, k in zip(query_weights, key_weights, strict=True)}
    if len(shapes) != 1:
        raise ValueError(f"the layers have {len(shapes)} different shapes {sorted(shapes)}; give layers of one shape")
    query, key = shapes.pop()
    if len(query) != 3 or len(key) != 3 or query[1:] != key[1:] or 0 in query + key or query[0] % key[0]:
        raise ValueError(
            f"weights are {list(query)} and {list(key)}; give query [H, D, d_model] and key [Hkv, D, d_model], "
            "H a multiple of Hkv"
        )


def _start(query_weights: Sequence[Tensor], key_weights: Sequence[Tensor]) -> _Vectors:
    """Random unit vectors, always the same; the global generator is left alone."""
    layers, (heads, head_dim, width), kv_heads = len(query_weights), query_weights[0].shape, len(key_weights[0])
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, head_dim), (kv_heads, width), (heads, width))
    starts = (torch.randn(layers, *shape, generator=generator).to(query_weights[0].device) for shape in shapes)
    return _Vectors(*(start / start.norm(dim=-1, keepdim=True) for start in starts))


def _iterate(query: list[Tensor], key: list[Tensor], vectors: _Vectors) -> tuple[_Vectors, HeadNorms]:
    """One power iteration of W_Q W_Q^T, of W_K^T W_K and of (W_Q^T W_K)^T (W_Q^T W_K), sharing their reads."""
    layers, heads, head_dim = vectors.query.shape
    kv_heads, width = vectors.key.shape[1:]
    group = heads // kv_heads
    by_key_head = vectors.query_key.view(layers, kv_heads, group, width)
    keyed = _apply(key, torch.cat([by_key_head, vectors.key.unsqueeze(2)], 2))
    chained = keyed[:, :, :group].reshape(layers, heads, head_dim)
    keys, _ = _unit(keyed[:, :, group], None)
    queried = _apply([w.mT for w in query], torch.stack([chained, vectors.query], 2))
    queried, _ = _unit(queried, None)
    chained, queries = _apply(query, queried).unbind(2)
    chained = chained.view(layers, kv_heads, group, head_dim)
    keyed = _apply([w.mT for w in key], torch.cat([chained, keys.unsqueeze(2)], 2))
    query_vectors, query_norm = _unit(queries, vectors.query)
    key_vectors, key_norm = _unit(keyed[:, :, group], vectors.key)
    both = keyed[:, :, :group].reshape(layers, heads, width)
    both_vectors, both_norm = _unit(both, vectors.query_key)
    norms = HeadNorms(query_norm, key_norm.repeat_interleave(group, 1), both_norm)
    return _Vectors(query_vectors, key_vectors, both_vectors), norms


def _apply(weights: list[Tensor], rows: Tensor) -> Tensor:
    """Every layer's weights [N, out, in] times its vectors [layers, N, c, in]: [layers, N, c, out]."""
    products = rows.new_empty(*rows.shape[:3], weights[0].shape[1])
    for weight, vectors, product in zip(weights, rows, products, strict=True):
        torch.bmm(vectors, weight.mT, out=product)
    return products


def _unit(rows: Tensor, fallback: Tensor | None) -> tuple[Tensor, Tensor]:
    """Vectors over their norms, and the norms; where a norm is 0 or not finite, the fallback (or 0) stands in, so that
    weights which recover find a vector to go on from."""
    norms = rows.norm(dim=-1)
    usable = ((norms > 0) & torch.isfinite(norms)).unsqueeze(-1)
    return torch.where(usable, rows / norms.unsqueeze(-1), 0.0 if fallback is None else fallback), norms
