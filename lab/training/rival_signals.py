"""What the rival monitors of weights and activations need, measured on the laboratory's model while it trains.

Three quantities, by the names under which a trace carries them (`TraceWriter.probe`):
- `stable_rank` [heads]: ||W_Q||_F^2 / ||W_Q||_2^2 of every head (MSign, arXiv 2602.01734, watches its decline);
- `sign_share` [3 x layers]: Spectral Alignment (arXiv 2510.04202). For the inputs x of a layer and the principal
  singular vector v of its weight, in the space of the inputs, the share of tokens on the more frequent side of
  sign(x . v): 0.5 healthy, 1 when sign diversity has collapsed. For W_Q, W_K and the first matrix of the feed-forward
  part of every layer, in this order;
- `entropy_start`, `entropy_last` [heads]: spectral entropy of the update of the QK bilinear form (arXiv 2606.28116).
  With M = W_Q^T W_K, the first-order term of its change is dQ^T K + Q^T dK; H = -sum p log p over p = s^2 / sum s^2 of
  its singular values s. The abstract does not say since when the update counts: `entropy_start` takes it since the
  first probe, with the first weights as Q and K, `entropy_last` since the probe before.
What the papers' accessible text leaves open is assumed as written here; docs/detectors.md lists it.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract.slots import Floats

_TINY: Final = 1e-30
_ITERATIONS: Final = 24
"""Of the power iteration for a principal singular vector, warm-started from the probe before."""


class ModelProbe:
    """Measures one GPT of `foreshock.lab.training.model`, on its device. Call `measure` every hundred steps or so.

    `tokens` int64 [B, S] are the text that activations are taken from: always the same, so that a change is the
    model's. A probe makes one forward pass without gradients, changes nothing and counts nothing.
    """

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self._model, self._tokens = model, tokens
        self._blocks = [cast(Any, block) for block in cast(Any, model).h]
        self._vectors: dict[str, Tensor] = {}
        self._start: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def measure(self) -> Mapping[str, Floats]:
        """The quantities now, by name; an entropy is NaN while nothing has changed."""
        query, key = self._weights()
        inputs = self._inputs()
        gram = torch.bmm(query, query.mT)
        largest = _eigenvalues(gram)[:, -1]
        measured = {
            "stable_rank": gram.diagonal(dim1=-2, dim2=-1).sum(-1) / largest,
            "sign_share": torch.cat([self._sign_share(*each) for each in self._matrices(inputs)]),
        }
        now = query, key
        if self._start is None or self._last is None:
            self._start = now
            unknown = torch.full((len(query),), torch.nan, device=query.device)
            measured |= {"entropy_start": unknown, "entropy_last": unknown}
        else:
            pairs = zip(self._start, self._last, now, strict=True)
            (old_query, new_query), (old_key, new_key) = (
                (torch.cat([start, last]), torch.cat([new, new])) for start, last, new in pairs
            )
            both = _entropy(old_query, old_key, new_query - old_query, new_key - old_key)  # in one decomposition
            measured |= dict(zip(("entropy_start", "entropy_last"), both.chunk(2), strict=True))
        self._last = now
        together = torch.cat(list(measured.values())).double().cpu().numpy()
        ends = np.cumsum([len(values) for values in measured.values()])[:-1]
        return dict(zip(measured, np.split(together, ends), strict=True))

    def _weights(self) -> tuple[Tensor, Tensor]:
        """W_Q and W_K of every head, the key head that a query head reads, float32 [N, D, E] copies."""
        both: list[tuple[Tensor, Tensor]] = []
        for block in self._blocks:
            query, key = self._projection(block.attn)
            both.append((query, key.repeat_interleave(len(query) // len(key), 0)))
        return torch.cat([q for q, _ in both]).float().clone(), torch.cat([k for _, k in both]).float().clone()

    def _projection(self, attention: Any) -> tuple[Tensor, Tensor]:
        """W_Q [H, D, E] and W_K [Hkv, D, E], views of the fused weight of Q, K and V."""
        heads = int(attention.n_head)
        kv_heads = int(getattr(attention, "n_kv_head", heads))
        weight = cast(Tensor, attention.c_attn.weight).detach()
        rows = weight.view(heads + 2 * kv_heads, -1, weight.shape[1])
        return rows[:heads], rows[heads : heads + kv_heads]

    def _inputs(self) -> list[tuple[Tensor, Tensor]]:
        """What attention and the feed-forward part of every layer are given, [B S, E] each."""
        caught: dict[nn.Module, Tensor] = {}

        def catch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            caught[module] = given[0].detach().flatten(0, -2)

        hooks = [part.register_forward_pre_hook(catch) for b in self._blocks for part in (b.attn, b.c_fc)]
        try:
            self._model(self._tokens, self._tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return [(caught[b.attn].float(), caught[b.c_fc].float()) for b in self._blocks]

    def _matrices(self, inputs: list[tuple[Tensor, Tensor]]) -> list[tuple[str, Tensor, Tensor]]:
        """Name, weights [layers, out, E] and inputs [layers, B S, E] of each kind of matrix."""
        read = [self._projection(block.attn) for block in self._blocks]
        attended, fed = (torch.stack([pair[which] for pair in inputs]) for which in (0, 1))
        return [
            ("query", torch.stack([q.flatten(0, 1) for q, _ in read]).float(), attended),
            ("key", torch.stack([k.flatten(0, 1) for _, k in read]).float(), attended),
            ("feed-forward", torch.stack([b.c_fc.weight for b in self._blocks]).float(), fed),
        ]

    def _sign_share(self, name: str, weights: Tensor, inputs: Tensor) -> Tensor:
        """[layers]."""
        vectors = self._vectors.get(name)
        if vectors is None:
            generator = torch.Generator().manual_seed(0)
            vectors = torch.randn(len(weights), weights.shape[-1], 1, generator=generator).to(weights.device)
        for _ in range(_ITERATIONS):
            vectors = torch.bmm(weights.mT, torch.bmm(weights, vectors))
            vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)
        self._vectors[name] = vectors
        positive = (torch.bmm(inputs, vectors).squeeze(-1) > 0).float().mean(-1)
        return torch.maximum(positive, 1 - positive)


def _entropy(query: Tensor, key: Tensor, query_change: Tensor, key_change: Tensor) -> Tensor:
    """Spectral entropy (nats) of the first-order change of W_Q^T W_K, [N]; all weights are [N, D, E].

    The term is A^T B with A = [dQ; Q], B = [K; dK], so its squared singular values are the eigenvalues of
    (A A^T)(B B^T): matrices of twice the head dimension in place of the width.
    """
    changed, whole = (part.norm(dim=(1, 2), keepdim=True) + _TINY for part in (query_change, query))
    left = torch.cat([query_change / changed, query / whole], 1)  # of one size, or float32 would lose the change
    right = torch.cat([key * changed, key_change * whole], 1)
    inner = torch.bmm(left, left.mT)
    ridge = 1e-7 * inner.diagonal(dim1=-2, dim2=-1).sum(-1)  # for a part that has no rank of its own
    root, failed = torch.linalg.cholesky_ex(inner + ridge[:, None, None] * torch.eye(inner.shape[1]).to(inner))
    squares = _eigenvalues(torch.bmm(root.mT, torch.bmm(torch.bmm(right, right.mT), root))).clamp_min(0)
    shares = squares / squares.sum(-1, keepdim=True)
    return torch.where(failed == 0, torch.special.entr(shares).sum(-1), torch.nan)


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Of symmetric matrices [N, D, D], ascending [N, D]; NaN for a matrix that is not finite, which LAPACK refuses."""
    finite = torch.isfinite(matrices).all(-1).all(-1, keepdim=True)
    return torch.where(finite, torch.linalg.eigvalsh(matrices.nan_to_num(0.0, 0.0, 0.0)), torch.nan)
