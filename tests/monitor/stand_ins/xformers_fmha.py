"""Stands in for xformers.ops.fmha 0.0.33: memory_efficient_attention, its inputs and some of its biases (attn_bias.py).

From 0.0.35 on the same functions come from mslk.attention.fmha. Not the library: plain PyTorch computes (attending.py).
"""

# mypy: disallow-untyped-calls=False

from dataclasses import dataclass
from typing import Any

import torch
from tests.monitor.stand_ins import attending
from torch import Tensor


class AttentionBias:
    """What the biases share."""


class LowerTriangularMask(AttentionBias):
    pass


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int


class LowerTriangularFromBottomRightMask(AttentionBias):
    pass


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int


@dataclass
class SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int


@dataclass
class BlockDiagonalMask(AttentionBias):
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | AttentionBias | None = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False


class _fMHA(torch.autograd.Function):  # noqa: N801 - the library's name
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, p: float, scale: Any) -> Tensor:
        rule: dict[str, Any] = {
            "causal": "Triangular" in type(attn_bias).__name__ or "Causal" in type(attn_bias).__name__,
            "top_left": "BottomRight" not in type(attn_bias).__name__,
        }
        if hasattr(attn_bias, "window_left"):
            rule["window"] = (attn_bias.window_left, attn_bias.window_right)
        elif hasattr(attn_bias, "_window_size"):
            rule["window"] = (attn_bias._window_size - 1, -1)
        if hasattr(attn_bias, "q_seqinfo"):
            rule |= {"cu_queries": attn_bias.q_seqinfo.seqstart, "cu_keys": attn_bias.k_seqinfo.seqstart}
        bias = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
        out, _ = attending.forward(ctx, query, key, value, scale=scale, dropout_p=p, bias=bias, **rule)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *attending.backward(ctx, grad), None, None, None


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Any:
    return _memory_efficient_attention(
        Inputs(query=query, key=key, value=value, p=p, attn_bias=attn_bias, scale=scale, output_dtype=output_dtype),
        op=op,
    )


def _memory_efficient_attention(inp: Inputs, op: Any = None) -> Any:
    query, key, value, bias = inp.query, inp.key, inp.value, inp.attn_bias
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        bias = bias.unsqueeze(1) if isinstance(bias, Tensor) else bias
    elif query.dim() == 5:
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
    out: Tensor = _fMHA.apply(query, key, value, bias, inp.p, inp.scale)
    return out.reshape(*inp.query.shape[:-1], value.shape[-1])
