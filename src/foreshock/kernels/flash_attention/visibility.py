"""Which keys a query sees: causal alignment, sliding window, packed sequences."""

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from foreshock.kernels.flash_attention.spec import AttentionSpec

UNSEEN: Final = 126 * math.log(2)
"""A bias this many nats below the largest of its row takes a key out of sight: exp of it is below the smallest
normal number of float32 and bf16."""
BLIND: Final = -1000.0
"""A row whose largest bias is no more than this sees nothing. People write masks of -1e4 and less."""


def hide(scores: Tensor, spec: AttentionSpec, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """Set scores [B, H, Sq, Sk] to -inf, in place, where a query does not see a key, NaN or not.

    Returns the number of keys that each query sees, [Sq] or [].
    """
    queries, keys = scores.shape[-2:]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        visible = _visible_packed(spec, queries, keys, cu_seqlens_q, cu_seqlens_k)
        scores.masked_fill_(~visible, -math.inf)
        return visible.sum(-1)
    lower, upper = _diagonals(spec, keys - queries)
    # tril_ and triu_ forget what a hidden score was, and are several times as fast on a CPU as masked_fill_.
    if upper is not None:
        scores.tril_(upper)
    if lower is not None:
        scores.triu_(lower)
    # A mask made while a CUDA graph is captured belongs to that graph; only the CPU's are kept for later calls.
    build = _barrier if scores.device.type == "cpu" else _barrier.__wrapped__
    barrier, visible_keys = build(queries, keys, lower, upper, scores.dtype, scores.device)
    if lower is not None or upper is not None:
        scores.add_(barrier)
    return visible_keys


def _diagonals(spec: AttentionSpec, difference: int) -> tuple[int | None, int | None]:
    """The lowest and highest j - i of a visible pair; None is no bound."""
    offset = 0 if spec.causal == "top_left" else difference
    right = [] if spec.window_right < 0 else [spec.window_right]
    if spec.causal != "none":
        right.append(0)
    return offset - spec.window_left if spec.window_left >= 0 else None, offset + min(right) if right else None


@lru_cache(maxsize=4)
def _barrier(
    queries: int, keys: int, lower: int | None, upper: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """0 for a visible pair and -inf for a hidden one, [Sq, Sk]; keys that each query sees, [Sq]."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if upper is not None:
        visible.tril_(upper)
    if lower is not None:
        visible.triu_(lower)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -math.inf), visible.sum(-1)


def _visible_packed(spec: AttentionSpec, queries: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Visible pairs of sequences packed end to end, bool [total_q, total_k]; past the last sequence there are none."""
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
    """The sequence of every token (N past the last one) and its position there, both [total]."""
    token = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return sequence, token - cu_seqlens[sequence]


def seen_keys(bias: Tensor) -> Tensor:
    """How many keys a row sees, [...], by what is added to its scores [..., Sk]; -inf where nothing can be seen.

    A key counts by its bias beside the largest of its row: 1 down to UNSEEN nats below it, and from there on
    exponentially less, so that nothing jumps where a bias is learned. So a mask is a mask whatever number it was
    written with, and the far keys of an ALiBi are seen as long as a score could bring them back. 0 for a row that is
    BLIND; 1 where a bias is NaN or infinite, since the row is not empty.
    """
    largest = bias.amax(-1, keepdim=True)
    # exp2, since on a CPU exp slows down tenfold where it underflows
    weights = bias.sub(largest).add_(UNSEEN).clamp_(max=0.0).mul_(math.log2(math.e)).exp2_()
    return weights.sum(-1).nan_to_num_(nan=1.0).masked_fill_((largest <= BLIND).squeeze(-1), 0.0)


def shared_by_keys(bias: Tensor) -> Tensor:
    """What is added to a row as a whole, [...]: the largest of its bias [..., Sk], which -inf hides keys from.

    Softmax does not see it, and if queries and keys have no part in it, it says nothing of a head: ALiBi by the
    position of the key is ALiBi by the distance. 0 for a row that is BLIND, and where a bias is NaN or infinite.
    """
    largest = bias.amax(-1).nan_to_num_(nan=0.0, posinf=0.0)
    return largest.masked_fill_(largest <= BLIND, 0.0)
