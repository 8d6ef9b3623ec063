"""A fake of flash_attn 2.8.4 (flash_attn/flash_attn_interface.py) with its functions, classes and arguments.

The computation is plain PyTorch (reference_attention.py).
"""

from typing import TYPE_CHECKING, Any

from tests.monitor.fake_libraries.reference_attention import function, public

ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SCORE_ARGUMENTS = "dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic"
DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False,
    "is_grad_enabled": True,
}  # fmt: skip
for cls, name, operands, last in (
    ("FlashAttnFunc", "flash_attn_func", "q, k, v", ""),
    ("FlashAttnQKVPackedFunc", "flash_attn_qkvpacked_func", "qkv", ""),
    ("FlashAttnKVPackedFunc", "flash_attn_kvpacked_func", "q, kv", ""),
    ("FlashAttnVarlenFunc", "flash_attn_varlen_func", f"q, k, v, {ENDS}", "block_table,"),
    ("FlashAttnVarlenQKVPackedFunc", "flash_attn_varlen_qkvpacked_func", "qkv, cu_seqlens, max_seqlen", ""),
    ("FlashAttnVarlenKVPackedFunc", "flash_attn_varlen_kvpacked_func", f"q, kv, {ENDS}", ""),
):
    arguments = f"{operands}, {SCORE_ARGUMENTS}, return_softmax, {last} is_grad_enabled"
    globals()[cls] = function(__name__, cls, arguments, None)
    globals()[name] = public(globals(), cls, f"{operands}, {SCORE_ARGUMENTS}, return_attn_probs, {last}", **DEFAULTS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
