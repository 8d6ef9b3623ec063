"""A fake of DotProductAttention in TransformerEngine 2.20.0.dev0 (d0067d0d).

It has the library's arguments and the attributes that describe the computation, which is plain PyTorch
(reference_attention.py).
"""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.monitor.fake_libraries import reference_attention
from torch import Tensor, nn


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, rule: dict[str, Any]) -> Tensor:
        return reference_attention.forward(ctx, q, k, v, scale=scale, **rule)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *reference_attention.backward(ctx, grad), None, None


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_size: int = 1,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self.num_attention_heads, self.tp_size = num_attention_heads, tp_size
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // tp_size
        self.hidden_size_per_attention_head_k = kv_channels
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.softmax_type, self.cp_group = window_size, softmax_type, None
        self.bottom_right_diagonal, self.return_max_logit = None, False
        self.flash_attention: Any = SimpleNamespace(softmax_scale=kv_channels**-0.5)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        kind, order = attn_mask_type or self.attn_mask_type, qkv_format or self.qkv_format
        assert query_layer is not None
        assert key_layer is not None
        assert value_layer is not None
        operands = query_layer, key_layer, value_layer
        if order == "sbhd":
            operands = tuple(x.transpose(0, 1) for x in operands)  # type: ignore[assignment]
        rule: dict[str, Any] = {
            "causal": "causal" in kind,
            "top_left": not kind.endswith("bottom_right") and kind != "no_mask",
            "window": window_size or self.window_size or (-1, -1),
            "cu_queries": cu_seqlens_q,
            "cu_keys": cu_seqlens_kv,
        }
        out: Tensor = Fused.apply(*operands, self.flash_attention.softmax_scale, rule)
        return (out.transpose(0, 1) if order == "sbhd" else out).flatten(-2)
