"""The judge of the zoo tells our faults from a model's own chaos."""

from typing import Any

import pytest
import torch
from tests.zoo.judge import Entry, examine
from tests.zoo.running import Case, draw_weights
from torch import Tensor, nn

from foreshock.monitor.attention.watched_layer import WatchedLayer


class Chaotic(nn.Module):
    """Attention, and then a map that makes two numbers a rounding apart differ by much of their size."""

    def __init__(self, doublings: int) -> None:
        super().__init__()
        self.num_heads, self.doublings = 2, doublings
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(2, 5, 2, 8).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        for _ in range(self.doublings):
            out = torch.sin(2 * out)
        return out


def _entry(doublings: int) -> Entry:
    def build() -> nn.Module:
        torch.manual_seed(2)
        draw_weights(model := Chaotic(doublings), seed=5)
        return model

    given = {"x": 3 * torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(8))}
    return Entry("chaotic", "made here", build, lambda model: [Case("unpadded", given)])


@pytest.mark.parametrize("doublings", [0, 16])
def test_what_a_model_does_to_a_rounding_of_its_weights_is_not_held_against_our_kernels(doublings: int) -> None:
    assert examine(_entry(doublings), ("kernels",)).wrong == []


@pytest.mark.parametrize(("doublings", "factor"), [(0, 1.001), (16, 1.001), (16, 1 + 1e-6)])
def test_an_attention_that_is_off_is_found_in_a_chaotic_model_too(
    monkeypatch: pytest.MonkeyPatch, doublings: int, factor: float
) -> None:
    attend = WatchedLayer.attend

    def off(self: WatchedLayer, *args: Any, **options: Any) -> Tensor | None:
        out = attend(self, *args, **options)
        return None if out is None else out * factor

    monkeypatch.setattr(WatchedLayer, "attend", off)
    assert examine(_entry(doublings), ("kernels",)).wrong
