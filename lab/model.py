"""A small GPT in the style of nanoGPT: the patient of the laboratory.

Attention is computed by `F.scaled_dot_product_attention`, so that `foreshock.monitor.attach` serves it unchanged.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a GPT. `attention_dtype` is the type of the operands that attention is given; the rest is float32."""

    layers: int
    heads: int
    width: int
    """Features of the residual stream; a multiple of `heads`."""
    context: int
    """Tokens of a sequence."""
    vocabulary: int = 256
    qkv_bias: bool = True
    """A bias on the keys adds one number to every score of a row: softmax cannot see it, rounding can."""
    attention_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads; give one that is")


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention, [B, S, width] to [B, S, width]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.heads
        self.operand = DTYPES[config.attention_dtype]
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.c_attn(x).to(self.operand).view(batch, length, 3, self.n_head, width // self.n_head)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, D]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.c_proj(out.transpose(1, 2).reshape(batch, length, width).to(x.dtype)))


class Block(nn.Module):
    """Attention and a four times wider GELU layer, each behind a LayerNorm and a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=False)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=False)
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=False)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + cast(Tensor, self.c_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    """Learned positions, LayerNorm without bias, output tied to the token embedding, nanoGPT's initialisation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats. `tokens` and `targets` are int64 [B, S]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
