"""Small models in common styles, and one training step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 48

Checkpoint = Callable[..., Tensor]
"""Activation checkpointing: calls its first argument with the others."""


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: fused QKV and F.scaled_dot_product_attention on transposed views."""

    def __init__(self, width: int, heads: int, *, checkpoint: Checkpoint | None = None) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.n_embd = width
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.n_head, width // self.n_head)
        query, key, value = (t.view(split).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2))
        y = self.core(query, key, value) if self.checkpoint is None else self.checkpoint(self.core, query, key, value)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))  # type: ignore[no-any-return]

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=True)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention with separate projections."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            proj(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for proj in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """An embedding, attention layers with residuals, and an output projection."""

    def __init__(self, *attentions: nn.Module, width: int = 16, checkpoint: Checkpoint | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(attentions or [CausalSelfAttention(width, 2), CausalSelfAttention(width, 2)])
        self.head = nn.Linear(width, VOCABULARY)
        self.checkpoint = checkpoint

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + (block(x) if self.checkpoint is None else self.checkpoint(block, x))
        return self.head(x)  # type: ignore[no-any-return]


def tiny_gpt(*attentions: nn.Module, seed: int = 0, **options: Any) -> TinyGPT:
    """A model with weights drawn from the seed, except those of the given `attentions`."""
    torch.manual_seed(seed)
    return TinyGPT(*attentions, **options)


def batch(step: int, *, rows: int = 2, length: int = 12) -> Tensor:
    """Token ids [rows, length] of this step."""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1000 + step))


class ImageAttention(nn.Module):
    """timm's attention: fused QKV, not causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class TinyViT(nn.Module):
    """A ViT with 2 x 2 patches and a class token. Its images are token ids [rows, 12], so the same loop trains it."""

    def __init__(self, width: int = 16, checkpoint: Checkpoint | None = None) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(ImageAttention(width, 2) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.checkpoint = checkpoint

    def forward(self, ids: Tensor) -> Tensor:
        x = self.patches(ids.view(-1, 1, 6, 2).to(self.head.weight.dtype) / VOCABULARY).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = x + (block(x) if self.checkpoint is None else self.checkpoint(block, x))
        return self.head(x[:, :1]).expand(-1, ids.shape[1], -1)  # type: ignore[no-any-return]


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy of logits [rows, length, V] against the next token of ids [rows, length]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_step(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, step: int, ids: Tensor | None = None
) -> Tensor:
    """Forward, backward and update on `ids`, by default `batch(step)`; returns the loss."""
    ids = batch(step) if ids is None else ids
    loss = next_token_loss(model(ids), ids)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss
