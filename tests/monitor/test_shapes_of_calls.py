"""Calls of attention with more or fewer dimensions than [B, H, S, D] are measured as what they are, to the count."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

WIDTH, TOKENS = 12, 5
QUIET: dict[str, Any] = {"url": None, "quiet": True, "strict": True, "probe_rows": 10**6}
WAYS = ["keep", "kernels"]


class Attention(nn.Module):
    """Attention over the last but one dimension of [..., S, W], however many stand before it."""

    heads_first = False

    def __init__(self, heads: int, mask: Tensor | None = None, *, apart: bool = True) -> None:
        super().__init__()
        self.num_heads, self.apart = heads, apart
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, latents: Tensor | None = None) -> Tensor:
        projected = (self.to_q(x if latents is None else latents), self.to_k(x), self.to_v(x))
        if self.apart:
            projected = tuple(y.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for y in projected)
        if self.heads_first:  # [B, H, W, S, D], as timm's Hiera
            projected = tuple(y.transpose(1, 2) for y in projected)
        out = F.scaled_dot_product_attention(*projected, attn_mask=self.mask)  # type: ignore[arg-type]
        out = out.transpose(1, 2) if self.heads_first else out
        return out.transpose(-2, -3).flatten(-2) if self.apart else out


def attention(heads: int, mask: Tensor | None = None, *, apart: bool = True) -> Attention:
    torch.manual_seed(31)
    module = Attention(heads, mask, apart=apart)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def words(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(32))


def counted(module: nn.Module, run: Callable[[nn.Module], Tensor], attention: Any = "keep") -> tuple[Tensor, Tensor]:
    """What one step counts, and the gradient of the keys' weight."""
    module = copy.deepcopy(module)
    with attach(module, attention=attention, **QUIET) as agent:
        torch.autograd.backward(run(module).square().sum())
        return agent._attached.state.clone(), module.to_k.weight.grad  # type: ignore[union-attr,return-value]


def rows(state: Tensor) -> int:
    return int(slot_values(state.numpy(), Slot.ROWS).sum())


def alike(state: Tensor, other: Tensor) -> None:
    """The same counts, and sums within the rounding of PyTorch's own attention, which takes each shape in a way of its
    own. Gradients are compared in calls of four dimensions alone."""
    for slot in set(Slot) - {Slot.WRONG_GRADIENT_ROWS, Slot.GRADIENT_ERROR_MAX}:
        counts, others = (slot_values(each.numpy(), slot) for each in (state, other))
        np.testing.assert_allclose(counts, others, rtol=1e-9, atol=1e-12, err_msg=slot.name)


def masks() -> list[Tensor | None]:
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -5.0)
    of_windows = torch.rand(3, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(33)) > 0.3
    return [None, hidden, of_windows]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", masks(), ids=["unmasked", "biased", "masked by window"])
def test_windows_in_a_dimension_of_their_own_count_as_entries_of_the_batch(mask: Tensor | None, way: str) -> None:
    windows = attention(4, mask)
    flat = attention(4, mask.repeat(2, 1, 1, 1) if mask is not None and mask.dim() == 4 else mask)
    x = words(2, 3, TOKENS)
    state, gradient = counted(windows, lambda m: m(x), way)
    expected, _ = counted(flat, lambda m: m(x.flatten(0, 1)))
    assert rows(expected) > 0
    alike(state, expected)
    windows(x).square().sum().backward()
    assert torch.equal(gradient, windows.to_k.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_as_many_windows_as_heads_are_told_apart_by_where_features_lie(way: str) -> None:
    module, x = attention(3), words(2, 3, TOKENS)
    state, _ = counted(module, lambda m: m(x), way)
    expected, _ = counted(module, lambda m: m(x.flatten(0, 1)))
    alike(state, expected)


@pytest.mark.promise("A24")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("windows", [3, 2])
def test_windows_behind_the_heads_are_named_and_never_counted_as_heads(
    windows: int, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = attention(3)
    module.heads_first = True
    state, _ = counted(module, lambda m: m(words(2, windows, TOKENS)), way)
    assert rows(state) == 0
    assert "which dimension holds its 3 heads is unclear" in caplog.text
    assert "announces others" not in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_queries_that_all_entries_of_a_batch_share_count_once_for_each(way: str) -> None:
    module = attention(3)
    x, latents = words(4, TOKENS), words(1, 2)
    state, gradient = counted(module, lambda m: m(x, latents), way)
    expected, _ = counted(module, lambda m: m(x, latents.expand(4, -1, -1)))
    assert rows(expected) > 0
    alike(state, expected)
    module(x, latents).square().sum().backward()
    assert torch.equal(gradient, module.to_k.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_single_head_without_a_dimension_of_its_own_counts_as_one(masked: bool, way: str) -> None:
    mask = torch.rand(3, TOKENS, TOKENS, generator=torch.Generator().manual_seed(34)) > 0.2 if masked else None
    x = words(3, TOKENS)
    state, _ = counted(attention(1, mask, apart=False), lambda m: m(x), way)
    expected, _ = counted(attention(1, mask if mask is None else mask.unsqueeze(1)), lambda m: m(x))
    assert rows(expected) > 0
    alike(state, expected)
