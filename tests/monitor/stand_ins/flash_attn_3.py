"""Stands in for flash_attn_interface of FlashAttention 3 (hopper/flash_attn_interface.py, commit c75d019d), and its
arguments. Not the library: plain PyTorch computes (attending.py).
"""

from typing import Any

from tests.monitor.stand_ins import attending
from torch import Tensor

SCALES = "q_descale, k_descale, v_descale"
REST = "window_size, attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin, return_softmax"
FlashAttnQKVPackedFunc = attending.function(
    __name__,
    "FlashAttnQKVPackedFunc",
    f"qkv, softmax_scale, causal, {SCALES}, window_size, attention_chunk, softcap, deterministic, num_heads_q, "
    "sm_margin, return_softmax",
)
FlashAttnFunc = attending.function(__name__, "FlashAttnFunc", f"q, k, v, softmax_scale, causal, qv, {SCALES}, {REST}")
FlashAttnVarlenFunc = attending.function(
    __name__,
    "FlashAttnVarlenFunc",
    "q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, "
    f"qv, {SCALES}, {REST}",
)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_heads_q: int | None = None,
) -> Any:
    rest = window_size, attention_chunk, softcap, False, num_heads_q, 0, False
    return FlashAttnQKVPackedFunc.apply(qkv, softmax_scale, causal, None, None, None, *rest)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
) -> Any:
    rest = window_size, attention_chunk, softcap, 1, None, False, 0, False
    return FlashAttnFunc.apply(q, k, v, softmax_scale, causal, None, None, None, None, *rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    packed = cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k
    rest = (-1, -1), 0, 0.0, 1, None, False, 0, False
    return FlashAttnVarlenFunc.apply(q, k, v, *packed, softmax_scale, causal, None, None, None, None, *rest)
