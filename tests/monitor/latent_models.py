"""Multi-head latent attention as people write it, and the scores that an attention module makes of given inputs."""

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


def interleaved(x: Tensor) -> Tensor:
    """Rotary positions of x [B, H, S, D] over neighbours, as in DeepSeek's code."""
    one, other = x[..., ::2], x[..., 1::2]
    cos, sin = _angles(x)
    return torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)


def in_halves(x: Tensor) -> Tensor:
    """The same over the two halves, as in Llama."""
    one, other = x.chunk(2, -1)
    cos, sin = _angles(x)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def neighbours_to_halves(x: Tensor) -> Tensor:
    """Neighbours turned, and put into halves, as DeepSeek-V3 in transformers."""
    turned = interleaved(x)
    return torch.cat([turned[..., ::2], turned[..., 1::2]], -1)


def unturned(x: Tensor) -> Tensor:
    """No positions, as in Kimi Linear."""
    return x


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(x.shape[-1] // 2)
    return angle.cos().to(x), angle.sin().to(x)


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def parts(x: Tensor, one: int, other: int) -> tuple[Tensor, Tensor]:
    """The first and the other features."""
    return x[..., :one], x[..., one : one + other]


class LatentAttention(nn.Module):
    """As in DeepSeek's own code, with its names."""

    n_heads, qk_head_dim = HEADS, HEAD

    def __init__(self, rotary: Callable[[Tensor], Tensor] = interleaved, *, bias: bool = False) -> None:
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
        latent, of_all = parts(self.wkv_a(x), LATENT, ROPE)
        own, value = parts(heads_of(self.wkv_b(self.kv_norm(latent)), self.n_heads), NOPE, VALUE)
        shared = self.rotary(of_all[:, None]).expand(-1, self.n_heads, -1, -1)
        return torch.cat([nope, self.rotary(rope)], -1), torch.cat([own, shared], -1), value

    def rows(self, head: int) -> list[tuple[Any, list[int], str]]:
        """The true rows of a head: projection, rows, and "query", "key" or "query alone"."""
        query, key = head * HEAD, head * (NOPE + VALUE)
        return [
            (self.wq_b, list(range(query, query + NOPE)), "query"),
            (self.wq_b, list(range(query + NOPE, query + HEAD)), "query alone"),
            (self.wkv_b, list(range(key, key + NOPE)), "key"),
        ]


class SequenceFirst(LatentAttention):
    """Its projections see [S, B, E], as Megatron's."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def of(y: Tensor) -> Tensor:
            return torch.unflatten(y, -1, (HEADS, -1)).permute(1, 2, 0, 3)

        x = x.transpose(0, 1).contiguous()
        nope, rope = parts(of(self.wq_b(self.q_norm(self.wq_a(x)))), NOPE, ROPE)
        latent, of_all = parts(self.wkv_a(x), LATENT, ROPE)
        own, value = parts(of(self.wkv_b(self.kv_norm(latent))), NOPE, VALUE)
        shared = self.rotary(of_all.transpose(0, 1)[:, None]).expand(-1, HEADS, -1, -1)
        return torch.cat([nope, self.rotary(rope)], -1), torch.cat([own, shared], -1), value


class NormedQueries(LatentAttention):
    """A norm of each head's queries behind the up-projection."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        return F.rms_norm(query, query.shape[-1:]), key, value


class NormedOwnKeys(LatentAttention):
    """A norm of the keys that are each head's own."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        return query, torch.cat([F.rms_norm(key[..., :NOPE], (NOPE,)), key[..., NOPE:]], -1), value


def two_latent_layers(make: Callable[[], nn.Module] = LatentAttention) -> TinyGPT:
    """A model of two layers of this attention."""
    torch.manual_seed(5)
    return tiny_gpt(make(), make())


@contextmanager
def inputs_of(*modules: nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    """What each of these modules was called with last."""
    kept: list[Any] = [None] * len(modules)

    def keep(place: int) -> Callable[..., None]:
        return lambda _, args, kwargs: kept.__setitem__(place, (args, kwargs))

    hooks = [module.register_forward_pre_hook(keep(i), with_kwargs=True) for i, module in enumerate(modules)]
    yield kept
    for hook in hooks:
        hook.remove()


def scores(module: nn.Module, given: tuple[Any, Any]) -> Tensor:
    """All scores [B, H, S, S] that a module, which nobody watches, makes of these inputs; those that are hidden -inf.
    The product is taken in float64."""
    kept: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        own = F.scaled_dot_product_attention

        def keep(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            scale, mask = options.get("scale") or query.shape[-1] ** -0.5, options.get("attn_mask")
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
            seen = seen if mask is None else seen & (mask if mask.dtype == torch.bool else mask == 0)
            product = query.detach().double() @ key.detach().double().mT * scale
            kept.append(product.masked_fill(~seen, float("-inf")))
            return own(query, key, value, *args, **options)

        patch.setattr(F, "scaled_dot_product_attention", keep)
        with torch.no_grad():
            module(*given[0], **given[1])
    (product,) = kept
    return product


class Adapted(nn.Linear):
    """A projection with an adapter that does nothing yet, as adapters begin."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.lora_A = nn.Parameter(torch.randn(2, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.lora_B @ self.lora_A)
