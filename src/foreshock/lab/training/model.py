"""A small GPT in the style of nanoGPT, which the laboratory trains.

Attention is computed by `F.scaled_dot_product_attention`, so `foreshock.monitor.attach` supports the model unchanged.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Dtype = Literal["bfloat16", "float32"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a GPT. Parameters, normalisation and the residual stream are float32."""

    layers: int
    heads: int
    width: int
    """Features of the residual stream; a multiple of `heads`."""
    context: int
    """Length of a sequence in tokens."""
    kv_heads: int | None = None
    """Number of key and value heads; a divisor of `heads`, None for the same number."""
    vocabulary: int = 256
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias. That of the keys adds the same number to all scores of a row, which
    changes rounding, but not softmax."""
    key_bias: bool = True
    """Whether `qkv_bias` includes the keys; this does not change the exact probabilities."""
    rotary: bool = False
    """Rotary instead of learned position embeddings."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm without bias, or RMSNorm; before attention, before the feed-forward part and at the end."""
    gated: bool = False
    """SwiGLU instead of GELU in the feed-forward part."""
    hidden: int | None = None
    """Hidden features of the feed-forward part; by default 4 `width`, or 8/3 `width` for SwiGLU (equal size)."""
    attention_dtype: Dtype = "bfloat16"
    """Type of the operands of attention."""
    matmul_dtype: Dtype = "float32"
    """Type of the operands of all other matrix products; bfloat16 as under autocast."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads; give one that is")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key heads; give a divisor")

    @property
    def key_heads(self) -> int:
        """Key and value heads of a layer."""
        return self.kv_heads or self.heads


class Linear(nn.Linear):
    """nn.Linear that computes in another type than that of its parameters, and returns that type."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.operand = dtype

    def forward(self, input: Tensor, kept: Tensor | None = None) -> Tensor:
        """Apply the layer; the bias is multiplied by `kept` [outputs], which contains 0 and 1."""
        bias = None if self.bias is None else self.bias.to(self.operand)
        bias = bias if bias is None or kept is None else bias * kept.to(self.operand)
        return F.linear(input.to(self.operand), self.weight.to(self.operand), bias)


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention, [B, S, width] to [B, S, width]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.heads, config.key_heads
        self.head_dim = config.width // config.heads
        self.operand, dtype = DTYPES[config.attention_dtype], DTYPES[config.matmul_dtype]
        values = self.n_kv_head * self.head_dim
        self.c_attn = Linear(config.width, config.width + 2 * values, dtype, bias=config.qkv_bias)
        self.c_proj = Linear(config.width, config.width, dtype)
        kept = torch.ones(config.width + 2 * values)
        kept[config.width : config.width + values] = 0.0
        self.register_buffer("kept", None if config.key_bias else kept, persistent=False)
        self.rotary = Rotary(config.context, self.head_dim) if config.rotary else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        width, values = x.shape[2], self.n_kv_head * self.head_dim
        query, key, value = self.c_attn(x, cast(Tensor | None, self.kept)).split([width, values, values], -1)
        query, key, value = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (query, key, value)
        )  # each [B, heads, S, D]
        query, key = self.rotary(query), self.rotary(key)
        out = self.core(query.to(self.operand), key.to(self.operand), value.to(self.operand))
        return cast(Tensor, self.c_proj(out.transpose(1, 2).reshape(x.shape)))

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention over [B, heads, S, D]."""
        grouped = self.n_kv_head != self.n_head
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Rotary(nn.Module):
    """Rotary position embeddings (RoFormer) with base 10000 and rotated halves, [B, H, S, D] to the same shape."""

    def __init__(self, context: int, head_dim: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        cosine, sine = (cast(Tensor, table)[: x.shape[2]] for table in (self.cosine, self.sine))
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dtype = DTYPES[config.matmul_dtype]
        hidden = config.hidden or (8 * config.width // 3 // 8 * 8 if config.gated else 4 * config.width)
        self.gated = config.gated
        self.ln_1 = _norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = _norm(config)
        self.c_fc = Linear(config.width, hidden * (1 + config.gated), dtype)
        self.c_proj = Linear(hidden, config.width, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        fed: Tensor = self.c_fc(self.ln_2(x))
        if self.gated:
            gate, fed = fed.chunk(2, -1)
            fed = F.silu(gate) * fed
        else:
            fed = F.gelu(fed)
        return x + cast(Tensor, self.c_proj(fed))


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width)
    return nn.LayerNorm(config.width, bias=False)


class GPT(nn.Module):
    """GPT with an output layer tied to the token embedding and nanoGPT's initialisation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = None if config.rotary else nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = _norm(config)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats. `tokens` and `targets` are int64 [B, S]."""
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        dtype = DTYPES[self.config.matmul_dtype]
        logits = F.linear(self.ln_f(x).to(dtype), self.wte.weight.to(dtype))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
