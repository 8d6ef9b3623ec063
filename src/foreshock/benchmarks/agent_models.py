"""The models whose training steps are timed: decoders as GPT-2 and Llama are, with the attention of each variant."""

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor.model.discovery import SDPA

BACKENDS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its batch. `gated`: RMS norms, rotary positions and a gated MLP, as Llama has; else as GPT-2."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int
    batch: int
    gated: bool
    whole: bool
    """torch.compile over the whole model; else layer by layer, as large models are compiled."""
    block_steps: int = 10
    share: int = 1
    """Every so many rounds of the others one of this: its steps are longer."""
    device: str = "cuda"


SHAPES: Final = (
    Shape("gpt2-small", 12, 768, 12, 12, 3072, 50304, 1024, 32, gated=False, whole=True, block_steps=20),
    Shape("llama-1b", 16, 2048, 32, 8, 8192, 128256, 4096, 4, gated=True, whole=False, share=2),
    Shape("gpt2-mini", 6, 384, 6, 6, 1536, 4096, 256, 4, gated=False, whole=True, device="cpu"),
)


class Attention(nn.Module):
    """Causal self-attention over [B, S, E], by one of PyTorch's backends or by whichever it chooses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.backend: SDPBackend | None = None
        self.num_heads, self.num_kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.width // shape.heads
        self.sizes = [shape.width, shape.kv_heads * self.head_dim, shape.kv_heads * self.head_dim]
        self.qkv = nn.Linear(shape.width, sum(self.sizes), bias=not shape.gated)
        self.out = nn.Linear(shape.width, shape.width, bias=not shape.gated)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        query, key, value = (
            t.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, dim=2)
        )
        if rotation is not None:
            query, key = _rotated(query, rotation), _rotated(key, rotation)
        return cast(Tensor, self.out(self.core(query, key, value).transpose(1, 2).flatten(2)))

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The call that `attach` finds. The backend is chosen inside the graph: torch.compile does not look outside."""
        grouped = self.num_heads != self.num_kv_heads
        if self.backend is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class UnwatchedAttention(Attention):
    """The same by PyTorch's own function, whatever its name is bound to while an agent is attached."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As in Attention."""
        grouped = self.num_heads != self.num_kv_heads
        assert self.backend is not None
        with sdpa_kernel(self.backend):
            return SDPA(query, key, value, is_causal=True, enable_gqa=grouped)


class KernelAttention(Attention):
    """The same by our operator with its statistics, and no agent."""

    state: Tensor
    modes: Tensor

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As in Attention."""
        return flash_attention(query, key, value, causal="top_left", state=self.state, modes=self.modes)


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    cosine, sine = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(shape.width), norm(shape.width)
        self.attention = Attention(shape)
        self.gated = shape.gated
        self.up = nn.Linear(shape.width, shape.hidden * (1 + shape.gated), bias=not shape.gated)
        self.down = nn.Linear(shape.hidden, shape.width, bias=not shape.gated)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotation)
        inner = self.up(self.norm_2(x))
        if self.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner, approximate="tanh")
        return cast(Tensor, x + self.down(inner))


class Model(nn.Module):
    """A decoder; forward gives the loss of predicting each token from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.rotation: Tensor | None
        half = shape.width // shape.heads // 2
        angles = torch.arange(shape.length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]) if shape.gated else None)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of token ids [B, S + 1]."""
        x = self.embedding(ids[:, :-1])
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
