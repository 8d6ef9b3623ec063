"""A head whose drift was planted, and one small layer of attention: runs and tensors whose truth is known."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.lab.diagnosis.calls import AttentionCall, Capture
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.monitor import attach
from foreshock.monitor.config import Numerics

TINY = replace(find_recipe("key-bias-small"), model=ModelConfig(layers=2, heads=2, width=16, context=16), batch=4)


class Attention(nn.Module):
    """One layer whose queries may be turned after W_Q; everything that enters attention is bf16."""

    def __init__(self, turn: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 8
        self.qkv = nn.Linear(16, 48)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).bfloat16().view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.turn(query), key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2).float()


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.attention(self.embedding(tokens))
        return hidden


def called(attention: nn.Module, numerics: Numerics = "kernel") -> tuple[AttentionCall, Model]:
    """One call of attention after a backward whose dO is far from small, and the model with its gradients."""
    torch.manual_seed(0)
    model = Model(attention)
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))
    with (
        attach(model, attention="kernels", quiet=True, url=None, spool_directory=None, numerics=numerics),
        Capture(model) as capture,
    ):
        (model(tokens).square().sum() * 10).backward(retain_graph=True)
    [call] = capture.calls
    return call, model
