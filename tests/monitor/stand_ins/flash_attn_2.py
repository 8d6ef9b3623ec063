"""Stands in for flash_attn 2.8.4 (flash_attn/flash_attn_interface.py): its functions and classes, and their arguments.

Not the library: plain PyTorch computes (attending.py).
"""

from typing import Any

import torch
from tests.monitor.stand_ins import attending
from torch import Tensor

ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
ASKED = "dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax"
GRAD = "is_grad_enabled"
FlashAttnQKVPackedFunc, FlashAttnVarlenQKVPackedFunc, FlashAttnKVPackedFunc, FlashAttnVarlenKVPackedFunc = (
    attending.function(__name__, f"FlashAttn{name}PackedFunc", f"{operands}, {ASKED}, {GRAD}", None)
    for name, operands in {
        "QKV": "qkv",
        "VarlenQKV": "qkv, cu_seqlens, max_seqlen",
        "KV": "q, kv",
        "VarlenKV": f"q, kv, {ENDS}",
    }.items()
)
FlashAttnFunc = attending.function(__name__, "FlashAttnFunc", f"q, k, v, {ASKED}, {GRAD}", None)
FlashAttnVarlenFunc = attending.function(
    __name__, "FlashAttnVarlenFunc", f"q, k, v, {ENDS}, {ASKED}, block_table, {GRAD}", None
)


def asked(
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> tuple[Any, ...]:
    return dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    return FlashAttnQKVPackedFunc.apply(qkv, *asked(*args, **options), torch.is_grad_enabled())


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    return FlashAttnKVPackedFunc.apply(q, kv, *asked(*args, **options), torch.is_grad_enabled())


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    given = asked(*args, **options)
    return FlashAttnVarlenQKVPackedFunc.apply(qkv, cu_seqlens, max_seqlen, *given, torch.is_grad_enabled())


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return FlashAttnVarlenKVPackedFunc.apply(q, kv, *ends, *asked(*args, **options), torch.is_grad_enabled())


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnFunc.apply(q, k, v, *given, torch.is_grad_enabled())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnVarlenFunc.apply(q, k, v, *ends, *given, block_table, torch.is_grad_enabled())
