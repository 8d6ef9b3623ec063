"""Stands in for flash_attn.cute of FlashAttention 4 (flash_attn/cute/interface.py, commit 0251105a), and its arguments.

Not the library: plain PyTorch computes (attending.py).
"""

from typing import Any

from tests.monitor.stand_ins.attending import function, public

SCORES = "softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic"
MODS = "score_mod, score_mod_bwd, mask_mod"
DEFAULTS: dict[str, Any] = {
    "causal": False, "window_size": (None, None), "softcap": 0.0, "num_splits": 1, "deterministic": False,
    "return_lse": False,
}  # fmt: skip
FlashAttnFunc = function(
    __name__,
    "FlashAttnFunc",
    f"q, k, v, qv, gather_kv_indices, {SCORES}, {MODS}, aux_tensors, aux_scalars, block_sparse_tensors, "
    "block_sparse_tensors_bwd, return_lse",
)
FlashAttnVarlenFunc = function(
    __name__,
    "FlashAttnVarlenFunc",
    "q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, min_seqlen_k, "
    f"gather_kv_indices, page_table, {SCORES}, {MODS}, block_sparse_tensors, aux_tensors, aux_scalars, return_lse, "
    "scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata",
)
flash_attn_func = public(globals(), "FlashAttnFunc", "q, k, v", **DEFAULTS)
flash_attn_varlen_func = public(globals(), "FlashAttnVarlenFunc", "q, k, v", **DEFAULTS)
