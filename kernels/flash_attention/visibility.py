"""Which keys a query sees: causal alignment, sliding window, packed sequences."""

from functools import lru_cache

import torch
from torch import Tensor

from foreshock.kernels.flash_attention.spec import AttentionSpec


def hidden_pairs(spec: AttentionSpec, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """The pairs that no query sees, bool [Sq, Sk] (None: every query sees every key), and the keys each sees, [Sq]."""
    # A mask made while a CUDA graph is captured belongs to that graph; only the CPU's masks are kept for later calls.
    build = _hidden_pairs if device.type == "cpu" else _hidden_pairs.__wrapped__
    return build(queries, keys, spec.causal, spec.window_left, spec.window_right, device)


@lru_cache(maxsize=4)
def _hidden_pairs(
    queries: int, keys: int, causal: str, window_left: int, window_right: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    if causal == "none" and window_left < 0 and window_right < 0:
        return None, torch.tensor(keys, device=device)
    offset = 0 if causal == "top_left" else keys - queries
    diagonal = torch.arange(queries, device=device).view(-1, 1) + offset
    visible = _in_reach(diagonal, torch.arange(keys, device=device), causal, window_left, window_right)
    return ~visible, visible.sum(-1)


def hidden_pairs_packed(
    spec: AttentionSpec, queries: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor]:
    """As `hidden_pairs` for sequences packed end to end; tokens past the last sequence see nothing."""
    sequence_q, position_q = _place(cu_seqlens_q, queries)
    sequence_k, position_k = _place(cu_seqlens_k, keys)
    difference = torch.nn.functional.pad(cu_seqlens_k.diff() - cu_seqlens_q.diff(), (0, 1))
    diagonal = position_q if spec.causal == "top_left" else position_q + difference[sequence_q]
    visible = _in_reach(diagonal.view(-1, 1), position_k, spec.causal, spec.window_left, spec.window_right)
    sequence_q = sequence_q.view(-1, 1)
    visible &= (sequence_q == sequence_k) & (sequence_q < len(cu_seqlens_q) - 1)
    return ~visible, visible.sum(-1)


def _place(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence of every token (N past the last one) and its position there, [total]."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(torch.int32), right=True)
    return sequence, token - cu_seqlens[sequence]


def _in_reach(diagonal: Tensor, key: Tensor, causal: str, window_left: int, window_right: int) -> Tensor:
    """Pairs that alignment and window allow, bool [Sq, Sk]; `diagonal` [Sq, 1] is the key that faces each query."""
    visible = torch.ones(len(diagonal), len(key), dtype=torch.bool, device=key.device)
    if causal != "none":
        visible &= key <= diagonal
    if window_right >= 0:
        visible &= key <= diagonal + window_right
    if window_left >= 0:
        visible &= key >= diagonal - window_left
    return visible
