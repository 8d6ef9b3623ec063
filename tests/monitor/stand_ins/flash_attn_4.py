"""Stands in for flash_attn.cute of FlashAttention 4 (flash_attn/cute/interface.py, commit 0251105a), and its arguments.

Not the library: plain PyTorch computes (attending.py).
"""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import torch
from tests.monitor.stand_ins import attending
from torch import Tensor

Window = tuple[int | None, int | None]


def sides(window: Window) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in window)
    return left, right


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        block_sparse_tensors: Any = None,
        block_sparse_tensors_bwd: Any = None,
        return_lse: bool = False,
    ) -> Any:
        rule: dict[str, Any] = {"causal": causal, "window": sides(window_size)}
        return attending.forward(ctx, q, k, v, scale=softmax_scale, softcap=softcap, **rule)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return *attending.backward(ctx, dout), *[None] * 18


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bwd: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        block_sparse_tensors: Any = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
    ) -> Any:
        rule: dict[str, Any] = {
            "causal": causal,
            "window": sides(window_size),
            "cu_queries": cu_seqlens_q,
            "cu_keys": cu_seqlens_k,
        }
        return attending.forward(ctx, q, k, v, scale=softmax_scale, softcap=softcap, **rule)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *args: Any) -> Any:
        return *attending.backward(ctx, dout), *[None] * 28


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Any:
    scores = softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic
    mods = score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars
    sparse = block_sparse_tensors, block_sparse_tensors_bwd
    return FlashAttnFunc.apply(q, k, v, qv, gather_kv_indices, *scores, *mods, *sparse, return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Any:
    packed = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, min_seqlen_k
    scores = softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic
    mods = score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, aux_tensors, aux_scalars
    rest = return_lse, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata
    return FlashAttnVarlenFunc.apply(q, k, v, qv, *packed, gather_kv_indices, page_table, *scores, *mods, *rest)
