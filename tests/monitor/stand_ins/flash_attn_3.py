"""Stands in for flash_attn_interface of FlashAttention 3 (hopper/flash_attn_interface.py, commit c75d019d), and its
arguments. Not the library: plain PyTorch computes (attending.py).
"""

# mypy: disallow-untyped-calls=False

from typing import Any

import torch
from tests.monitor.stand_ins import attending
from torch import Tensor


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        softmax_scale: float | None,
        causal: bool,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        deterministic: bool = False,
        num_heads_q: int | None = None,
        sm_margin: int = 0,
        return_softmax: bool = False,
    ) -> Any:
        assert num_heads_q is not None
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads, heads], -2)
        rule: dict[str, Any] = {"causal": causal, "window": window_size}
        out, lse = attending.forward(ctx, q, k, v, scale=softmax_scale, softcap=softcap, **rule)
        return (out, lse) if return_softmax else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return torch.cat(attending.backward(ctx, dout), -2), *[None] * 12


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_softmax: bool = False,
    ) -> Any:
        rule: dict[str, Any] = {"causal": causal, "window": window_size}
        out, lse = attending.forward(ctx, q, k, v, scale=softmax_scale, softcap=softcap, **rule)
        return (out, lse) if return_softmax else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return *attending.backward(ctx, dout), *[None] * 14


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        causal: bool,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_softmax: bool = False,
    ) -> Any:
        rule: dict[str, Any] = {
            "causal": causal,
            "window": window_size,
            "cu_queries": cu_seqlens_q,
            "cu_keys": cu_seqlens_k,
        }
        out, lse = attending.forward(ctx, q, k, v, scale=softmax_scale, softcap=softcap, **rule)
        return (out, lse) if return_softmax else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return *attending.backward(ctx, dout), *[None] * 20


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    scales = q_descale, k_descale, v_descale
    rest = attention_chunk, softcap, deterministic, num_heads_q, sm_margin, return_attn_probs
    return FlashAttnQKVPackedFunc.apply(qkv, softmax_scale, causal, *scales, window_size, *rest)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    scales = qv, q_descale, k_descale, v_descale
    rest = attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs
    return FlashAttnFunc.apply(q, k, v, softmax_scale, causal, *scales, window_size, *rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    packed = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    scales = qv, q_descale, k_descale, v_descale
    rest = attention_chunk, softcap, num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs
    return FlashAttnVarlenFunc.apply(q, k, v, *packed, softmax_scale, causal, *scales, window_size, *rest)
