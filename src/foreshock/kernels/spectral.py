"""Spectral norms of W_Q, W_K and W_Q W_K^T for every head of every layer.

Every weight is read once, to form the Gram matrices W W^T [D, D] of the heads. Power iteration then runs in head
space, on all heads of all layers at once, with the 16th power of each matrix. It starts at the last leading vector and
at a random one, because a vector that converged to the old leading direction is slow to find a new one. Does not
synchronise with the host.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

_DOUBLINGS: Final = 4
"""How often a matrix is squared. With 4 squarings, one iteration is worth 16."""
_ITERATIONS: Final = 16


class HeadNorms(NamedTuple):
    """Spectral norms, each float32 [layers, H]. Power iteration converges from below, so it never overestimates."""

    query: Tensor
    key: Tensor
    """Norm of the key head that the query head reads."""
    query_key: Tensor
    """Norm of the map from two token vectors to their score before scaling; in the paper's notation W_Q W_K^T."""


class SpectralNorms:
    """Track the spectral norms of layers with the same shape; use one object for each group of such layers.

    Within 1 % of the true norm, even for random matrices, whose leading values are close together, and in the first
    call after the leading direction changed.
    """

    def __init__(self) -> None:
        self._vectors: tuple[Tensor, Tensor] | None = None
        self._generator: torch.Generator | None = None

    @torch.no_grad()
    def __call__(self, query: Tensor, key: Tensor) -> HeadNorms:
        """Return the norms of weights W, given their Gram matrices W W^T (`head_grams`).

        query is float32 [layers, H, D, D], key [layers, Hkv, D, D]; both must have the same shape at every call.
        """
        layers, heads, kv_heads = *query.shape[:2], key.shape[1]
        own = torch.cat([query, key], 1).flatten(0, 1)
        read = key.repeat_interleave(heads // kv_heads, 1).flatten(0, 1)
        own_starts, both_starts = self._starts(own, len(read))
        own_vectors, own_values = _power(own, None, own_starts)
        both_vectors, both_values = _power(query.flatten(0, 1), read, both_starts)
        self._vectors = own_vectors, both_vectors
        own_norms = own_values.sqrt().view(layers, heads + kv_heads)
        key_norms = own_norms[:, heads:].repeat_interleave(heads // kv_heads, 1)
        return HeadNorms(own_norms[:, :heads], key_norms, both_values.sqrt().view(layers, heads))

    def _starts(self, own: Tensor, both: int) -> tuple[Tensor, Tensor]:
        """Two start vectors for each matrix, [N, D, 2]: the last call's, if it is finite, and a random one."""
        if self._generator is None:
            self._generator = torch.Generator(own.device).manual_seed(0)
        fresh = torch.randn(
            len(own) + both, own.shape[-1], 2, generator=self._generator, dtype=own.dtype, device=own.device
        )
        if self._vectors is not None:
            known = torch.cat(self._vectors)
            fresh[..., 0] = torch.where(torch.isfinite(known).all(-1, keepdim=True), known, fresh[..., 0])
        return fresh[: len(own)], fresh[len(own) :]


@torch.no_grad()
def head_grams(weights: Tensor) -> Tensor:
    """Return W W^T of every head, float32 [heads, D, D]; weights are [heads, D, d_model] with any strides."""
    wide = weights.detach().float()
    return torch.bmm(wide, wide.mT)


def _unit(x: Tensor, dim: int | tuple[int, int]) -> Tensor:
    """Divide `x` by its norms over these dimensions; zero vectors stay zero."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return x / norm.clamp_min(torch.finfo(x.dtype).tiny)


def _power(left: Tensor, right: Tensor | None, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Leading vector [N, D] and value [N] of `left`, or of `left` times `right`, positive semidefinite [N, D, D].

    `vectors` [N, D, c] are iterated in parallel; the one with the largest value is returned. With L = W_Q W_Q^T,
    R = W_K W_K^T and z = W_K^T u, the value of L R at u is |W_Q^T W_K z|^2 / |z|^2 = y^T L y / u^T y, y = R u.
    """
    power = left if right is None else torch.bmm(left, right)
    for _ in range(_DOUBLINGS):
        power = _unit(power, (1, 2))
        power = torch.bmm(power, power)
    for _ in range(_ITERATIONS):
        vectors = _unit(torch.bmm(power, vectors), 1)
    inner = vectors if right is None else torch.bmm(right, vectors)
    outer = torch.bmm(left, inner)
    values = (inner * outer).sum(1) / (vectors * inner).sum(1)
    vectors = _unit(outer, 1)
    values = torch.where(outer.norm(dim=1) == 0, 0.0, values)  # a zero matrix gives 0 / 0
    best, index = values.max(1)
    return vectors.gather(2, index.view(-1, 1, 1).expand(-1, vectors.shape[1], 1)).squeeze(2), best
