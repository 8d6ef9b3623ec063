"""Multi-head latent attention in common styles, and the scores of an attention module for given inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.tiny_models import TinyGPT, tiny_gpt
from torch import Tensor, nn

WIDTH, HEADS, NOPE, ROPE, VALUE, LATENT = 16, 4, 6, 4, 6, 12
HEAD = NOPE + ROPE


def rotate_interleaved(x: Tensor) -> Tensor:
    """Rotary positions of x [B, H, S, D] over interleaved pairs, as in DeepSeek's code."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = _angles(x)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


def rotate_halves(x: Tensor) -> Tensor:
    """Rotary positions over the two halves, as in Llama."""
    first, second = x.chunk(2, -1)
    cos, sin = _angles(x)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def rotate_interleaved_to_halves(x: Tensor) -> Tensor:
    """Rotates interleaved pairs and reorders them into halves, as transformers' DeepSeek-V3."""
    turned = rotate_interleaved(x)
    return torch.cat([turned[..., ::2], turned[..., 1::2]], -1)


def without_positions(x: Tensor) -> Tensor:
    """Without positions, as in Kimi Linear."""
    return x


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(x.shape[-1] // 2)
    return angle.cos().to(x), angle.sin().to(x)


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def parts(x: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """Splits the features into two parts of these widths."""
    return x[..., :first], x[..., first : first + second]


class LatentAttention(nn.Module):
    """Latent attention with the names of DeepSeek's code."""

    n_heads, qk_head_dim = HEADS, HEAD

    def __init__(self, rotary: Callable[[Tensor], Tensor] = rotate_interleaved, *, bias: bool = False) -> None:
        super().__init__()
        self.rotary = rotary
        self.wq_a = nn.Linear(WIDTH, LATENT, bias=False)
        self.q_norm = nn.RMSNorm(LATENT)
        self.wq_b = nn.Linear(LATENT, self.n_heads * HEAD, bias=bias)
        self.wkv_a = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(LATENT)
        self.wkv_b = nn.Linear(LATENT, self.n_heads * (NOPE + VALUE), bias=bias)
        self.wo = nn.Linear(self.n_heads * VALUE, WIDTH, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nope, rope = parts(heads_of(self.wq_b(self.q_norm(self.wq_a(x))), self.n_heads), NOPE, ROPE)
        latent, shared_input = parts(self.wkv_a(x), LATENT, ROPE)
        own, value = parts(heads_of(self.wkv_b(self.kv_norm(latent)), self.n_heads), NOPE, VALUE)
        shared = self.rotary(shared_input[:, None]).expand(-1, self.n_heads, -1, -1)
        return torch.cat([nope, self.rotary(rope)], -1), torch.cat([own, shared], -1), value

    def rows(self, head: int) -> list[tuple[Any, list[int], str]]:
        """The rows of a head: projection, row numbers, and "query", "key" or "query only"."""
        query, key = head * HEAD, head * (NOPE + VALUE)
        return [
            (self.wq_b, list(range(query, query + NOPE)), "query"),
            (self.wq_b, list(range(query + NOPE, query + HEAD)), "query only"),
            (self.wkv_b, list(range(key, key + NOPE)), "key"),
        ]


class SequenceFirst(LatentAttention):
    """Latent attention whose projections get [S, B, E], as in Megatron."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def of(y: Tensor) -> Tensor:
            return torch.unflatten(y, -1, (HEADS, -1)).permute(1, 2, 0, 3)

        x = x.transpose(0, 1).contiguous()
        nope, rope = parts(of(self.wq_b(self.q_norm(self.wq_a(x)))), NOPE, ROPE)
        latent, shared_input = parts(self.wkv_a(x), LATENT, ROPE)
        own, value = parts(of(self.wkv_b(self.kv_norm(latent))), NOPE, VALUE)
        shared = self.rotary(shared_input.transpose(0, 1)[:, None]).expand(-1, HEADS, -1, -1)
        return torch.cat([nope, self.rotary(rope)], -1), torch.cat([own, shared], -1), value


class QueriesNormedPerHead(LatentAttention):
    """Latent attention with a norm of each head's queries after the up-projection."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        return F.rms_norm(query, query.shape[-1:]), key, value


class OwnKeysNormed(LatentAttention):
    """Latent attention with a norm of the keys that heads do not share."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        return query, torch.cat([F.rms_norm(key[..., :NOPE], (NOPE,)), key[..., NOPE:]], -1), value


def two_latent_layers(make: Callable[[], nn.Module] = LatentAttention) -> TinyGPT:
    """A model with two layers of this attention."""
    torch.manual_seed(5)
    return tiny_gpt(make(), make())


@contextmanager
def last_inputs_of(*modules: nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    """Records the arguments of each module's last call."""
    recorded: list[Any] = [None] * len(modules)

    def record(place: int) -> Callable[..., None]:
        return lambda _, args, kwargs: recorded.__setitem__(place, (args, kwargs))

    hooks = [module.register_forward_pre_hook(record(i), with_kwargs=True) for i, module in enumerate(modules)]
    yield recorded
    for hook in hooks:
        hook.remove()


def scores(module: nn.Module, given: tuple[Any, Any]) -> Tensor:
    """All scores [B, H, S, S] of an unwatched module for these inputs, in float64; -inf if hidden."""
    recorded: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        own = F.scaled_dot_product_attention

        def record(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            scale, mask = options.get("scale") or query.shape[-1] ** -0.5, options.get("attn_mask")
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            seen = seen if mask is None else seen & (mask if mask.dtype == torch.bool else mask == 0)
            product = query.detach().double() @ key.detach().double().mT * scale
            recorded.append(product.masked_fill(~seen, float("-inf")))
            return own(query, key, value, *args, **options)

        patch.setattr(F, "scaled_dot_product_attention", record)
        with torch.no_grad():
            module(*given[0], **given[1])
    (product,) = recorded
    return product


class WithLora(nn.Linear):
    """A projection with a newly initialised LoRA adapter, which adds zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.lora_A = nn.Parameter(torch.randn(2, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.lora_B @ self.lora_A)
