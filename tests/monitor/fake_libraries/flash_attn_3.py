"""A fake of flash_attn_interface in FlashAttention 3 (hopper/flash_attn_interface.py, commit c75d019d).

It has the library's arguments. The computation is plain PyTorch (reference_attention.py).
"""

from typing import Any

from tests.monitor.fake_libraries.reference_attention import function, public

SCALES = "q_descale, k_descale, v_descale"
REST = "window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin, return_softmax"
DEFAULTS: dict[str, Any] = {
    "causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1,
    "deterministic": False, "sm_margin": 0,
}  # fmt: skip
FlashAttnQKVPackedFunc = function(
    __name__,
    "FlashAttnQKVPackedFunc",
    f"qkv, softmax_scale, causal, {SCALES}, window_size, attention_chunk, softcap, deterministic, num_heads_q, "
    "sm_margin, return_softmax",
)
FlashAttnFunc = function(__name__, "FlashAttnFunc", f"q, k, v, softmax_scale, causal, qv, {SCALES}, {REST}")
flash_attn_qkvpacked_func = public(
    globals(), "FlashAttnQKVPackedFunc", "qkv, softmax_scale, causal, num_heads_q", **DEFAULTS
)
flash_attn_func = public(globals(), "FlashAttnFunc", "q, k, v, softmax_scale, causal", **DEFAULTS)
