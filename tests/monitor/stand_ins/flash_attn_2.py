"""Stands in for flash_attn 2.8.4 (flash_attn/flash_attn_interface.py): its functions and classes, and their arguments.

Not the library: plain PyTorch computes (attending.py).
"""

# mypy: disallow-untyped-calls=False

from typing import Any

import torch
from tests.monitor.stand_ins import attending
from torch import Tensor


def computed(
    ctx: Any,
    operands: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_softmax: Any,
    **ends: Any,
) -> Any:
    rule = {"causal": causal, "window": window_size, **ends}
    scores = {"scale": softmax_scale, "softcap": softcap, "slopes": alibi_slopes, "dropout_p": dropout_p}
    q, k, v = operands
    out, lse = attending.forward(ctx, q, k, v, **scores, **rule)
    return (out, lse, None) if return_softmax else out


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Any:
        asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        return computed(ctx, qkv.unbind(2), *asked)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return torch.stack(attending.backward(ctx, dout), 2), *[None] * 9


class FlashAttnVarlenQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Any:
        asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        return computed(ctx, qkv.unbind(1), *asked, cu_queries=cu_seqlens, cu_keys=cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return torch.stack(attending.backward(ctx, dout), 1), *[None] * 11


class FlashAttnKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Any:
        asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        return computed(ctx, (q, *kv.unbind(2)), *asked)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        dq, dk, dv = attending.backward(ctx, dout)
        return dq, torch.stack((dk, dv), 2), *[None] * 9


class FlashAttnVarlenKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Any:
        asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        return computed(ctx, (q, *kv.unbind(1)), *asked, cu_queries=cu_seqlens_q, cu_keys=cu_seqlens_k)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        dq, dk, dv = attending.backward(ctx, dout)
        return dq, torch.stack((dk, dv), 1), *[None] * 13


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Any:
        asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        return computed(ctx, (q, k, v), *asked)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return *attending.backward(ctx, dout), *[None] * 9


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        block_table: Tensor | None,
        is_grad_enabled: bool,
    ) -> Any:
        asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        return computed(ctx, (q, k, v), *asked, cu_queries=cu_seqlens_q, cu_keys=cu_seqlens_k)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return *attending.backward(ctx, dout), *[None] * 14


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnQKVPackedFunc.apply(qkv, *asked, torch.is_grad_enabled())


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnKVPackedFunc.apply(q, kv, *asked, torch.is_grad_enabled())


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
    asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnFunc.apply(q, k, v, *asked, torch.is_grad_enabled())


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnVarlenQKVPackedFunc.apply(qkv, cu_seqlens, max_seqlen, *asked, torch.is_grad_enabled())


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Any:
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnVarlenKVPackedFunc.apply(q, kv, *packed, *asked, torch.is_grad_enabled())


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
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    asked = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnVarlenFunc.apply(q, k, v, *packed, *asked, block_table, torch.is_grad_enabled())
