"""Determine which keys a query sees: causal alignment, sliding window, packed sequences."""

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from foreshock.kernels.flash_attention.spec import AttentionSpec

UNSEEN: Final = 126 * math.log(2)
"""A bias this many nats below the largest of its row hides a key: exp(-UNSEEN) is the smallest normal number of
float32 and bf16."""
BLIND: Final = -1000.0
"""A row whose largest bias is at most this does not see any key. Masks in use are -1e4 or lower."""


def hide(scores: Tensor, spec: AttentionSpec, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """Set scores [B, H, Sq, Sk] of keys that a query does not see to -inf, in place, even if they are NaN.

    Returns the number of keys that each query sees, [Sq] or [].
    """
    queries, keys = scores.shape[-2:]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        visible = _visible_packed(spec, queries, keys, cu_seqlens_q, cu_seqlens_k)
        scores.masked_fill_(~visible, -math.inf)
        return visible.sum(-1)
    lower, upper = _diagonals(spec, keys - queries)
    # tril_ and triu_ overwrite hidden NaNs too, and on a CPU are several times as fast as masked_fill_.
    if upper is not None:
        scores.tril_(upper)
    if lower is not None:
        scores.triu_(lower)
    # A mask made while a CUDA graph is captured belongs to that graph, so only CPU masks are cached.
    build = _barrier if scores.device.type == "cpu" else _barrier.__wrapped__
    barrier, visible_keys = build(queries, keys, lower, upper, scores.dtype, scores.device)
    if lower is not None or upper is not None:
        scores.add_(barrier)
    return visible_keys


def _diagonals(spec: AttentionSpec, difference: int) -> tuple[int | None, int | None]:
    """Return the lowest and highest j - i of a visible pair; None means unbounded."""
    offset = 0 if spec.causal == "top_left" else difference
    right = [] if spec.window_right < 0 else [spec.window_right]
    if spec.causal != "none":
        right.append(0)
    return offset - spec.window_left if spec.window_left >= 0 else None, offset + min(right) if right else None


@lru_cache(maxsize=4)
def _barrier(
    queries: int, keys: int, lower: int | None, upper: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return 0 for a visible pair and -inf for a hidden one, [Sq, Sk], and the keys that each query sees, [Sq]."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if upper is not None:
        visible.tril_(upper)
    if lower is not None:
        visible.triu_(lower)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -math.inf), visible.sum(-1)


def _visible_packed(spec: AttentionSpec, queries: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Return the visible pairs of packed sequences, bool [total_q, total_k]; False after the last sequence."""
    sequence_q, position_q = place(cu_seqlens_q, queries)
    sequence_k, position_k = place(cu_seqlens_k, keys)
    difference = torch.nn.functional.pad(cu_seqlens_k.diff() - cu_seqlens_q.diff(), (0, 1))
    diagonal = position_q if spec.causal == "top_left" else position_q + difference[sequence_q]
    distance = position_k - diagonal.view(-1, 1)
    visible = (sequence_q.view(-1, 1) == sequence_k) & (sequence_q.view(-1, 1) < len(cu_seqlens_q) - 1)
    lower, upper = _diagonals(spec, 0)
    if upper is not None:
        visible &= distance <= upper
    if lower is not None:
        visible &= distance >= lower
    return visible


def place(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return each token's sequence (N after the last one) and its position in that sequence, both [total]."""
    token = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return sequence, token - cu_seqlens[sequence]


def seen_keys(bias: Tensor) -> Tensor:
    """Return how many keys a row sees, [...], given the bias [..., Sk] on its scores; -inf hides a key.

    A key counts as 1 if its bias is at most UNSEEN nats below the largest bias of its row, and exponentially less
    beyond that, so that the count of a learned bias changes smoothly. So masks work with any large negative number,
    and distant keys under ALiBi count as long as their scores can still matter. 0 for a row that is BLIND; 1 if a bias
    is NaN or infinite, because the row is not empty.
    """
    largest = bias.amax(-1, keepdim=True)
    # exp2, because on a CPU exp becomes ten times slower when it underflows
    weights = bias.sub(largest).add_(UNSEEN).clamp_(max=0.0).mul_(math.log2(math.e)).exp2_()
    return weights.sum(-1).nan_to_num_(nan=1.0).masked_fill_((largest <= BLIND).squeeze(-1), 0.0)


def shared_by_keys(bias: Tensor) -> Tensor:
    """Return the number added to a whole row, [...]: the largest of its bias [..., Sk], in which -inf hides a key.

    Softmax does not change with it. If it does not depend on queries and keys either, it carries no information about
    the head: ALiBi by the key's position equals ALiBi by distance. 0 for a row that is BLIND, or if a bias is NaN or
    infinite.
    """
    largest = bias.amax(-1).nan_to_num_(nan=0.0, posinf=0.0)
    return largest.masked_fill_(largest <= BLIND, 0.0)
