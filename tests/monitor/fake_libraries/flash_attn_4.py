"""A fake of flash_attn.cute in FlashAttention 4 (flash_attn/cute/interface.py, commit 0251105a) with its arguments.

The computation is plain PyTorch (reference_attention.py).
"""

from typing import Any

from tests.monitor.fake_libraries.reference_attention import function, public

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
flash_attn_func = public(globals(), "FlashAttnFunc", "q, k, v", **DEFAULTS)
