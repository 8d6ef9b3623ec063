"""Stands in for Megatron-Core 0.20.0 (d98e8a64): its own DotProductAttention, in PyTorch's operators.

Not the library, but the attributes that tell what it computes (dot_product_attention.py, fused_softmax.py).
"""

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn


class AttnMaskType(Enum):
    padding = 1
    causal = 2
    no_mask = 3


class FusedScaleMaskSoftmax(nn.Module):
    def __init__(self, attn_mask_type: AttnMaskType, scale: float | None, window_size: tuple[int, int] | None) -> None:
        super().__init__()
        self.attn_mask_type, self.scale, self.window_size = attn_mask_type, scale, window_size

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        return False  # it wants CUDA

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores if self.scale is None else scores * self.scale
        queries, keys = scores.shape[2:]
        everything = torch.ones(queries, keys, dtype=torch.bool)
        if self.window_size is not None:
            left, right = self.window_size
            mask = ~everything.triu(keys - queries - left).tril(keys - queries + right)
        elif self.attn_mask_type == AttnMaskType.causal and mask is None:
            mask = everything.triu(1)
        return (scores if mask is None else scores.masked_fill(mask, -10000.0)).softmax(-1)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        heads: int,
        groups: int,
        kv_channels: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        layer_number: int = 1,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.num_attention_heads_per_partition, self.num_query_groups_per_partition = heads, groups
        self.hidden_size_per_attention_head = kv_channels
        self.softmax_scale = 1 / math.sqrt(kv_channels) / layer_number
        self.scale_mask_softmax = FusedScaleMaskSoftmax(attn_mask_type, layer_number, window_size)
        self.attention_dropout = nn.Dropout(0.0)
        self.softmax_offset = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        group = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.softmax_scale
        probs = self.attention_dropout(self.scale_mask_softmax(scores, attention_mask))
        return torch.einsum("bhst,tbhd->sbhd", probs, value).flatten(-2)
