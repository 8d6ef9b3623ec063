"""Stands in for flash_attn.cute of FlashAttention 4 (flash_attn/cute/interface.py, commit 0251105a), and its arguments.

Not the library: plain PyTorch computes (attending.py).
"""

from typing import Any

from tests.monitor.stand_ins import attending
from torch import Tensor

Window = tuple[int | None, int | None]
SCORES = "softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic"
MODS = "score_mod, score_mod_bwd, mask_mod"
FlashAttnFunc = attending.function(
    __name__,
    "FlashAttnFunc",
    f"q, k, v, qv, gather_kv_indices, {SCORES}, {MODS}, aux_tensors, aux_scalars, block_sparse_tensors, "
    "block_sparse_tensors_bwd, return_lse",
)
FlashAttnVarlenFunc = attending.function(
    __name__,
    "FlashAttnVarlenFunc",
    "q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, min_seqlen_k, "
    f"gather_kv_indices, page_table, {SCORES}, {MODS}, block_sparse_tensors, aux_tensors, aux_scalars, return_lse, "
    "scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata",
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    mask_mod: Any = None,
) -> Any:
    scores = None, causal, window_size, learnable_sink, 0.0, 1, None, False
    return FlashAttnFunc.apply(q, k, v, None, None, *scores, None, None, mask_mod, None, None, None, None, False)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool = False
) -> Any:
    packed = cu_seqlens_q, cu_seqlens_k, None, None, None, None, None, None, None
    scores = None, causal, (None, None), None, 0.0, 1, None, False
    rest = None, None, None, None, None, None, False, None, None, False
    return FlashAttnVarlenFunc.apply(q, k, v, None, *packed, *scores, *rest)
