"""The judge of the zoo tells our faults from a model's own chaos."""

import contextlib
from typing import Any

import pytest
import torch
from tests.zoo import census
from tests.zoo.judge import Entry, examine
from tests.zoo.redrawing import Redrawing
from tests.zoo.run import look_at
from tests.zoo.running import Case, TookTooLongError, at_most, draw_weights
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


def test_the_limit_of_time_is_not_taken_for_an_error_of_the_model() -> None:
    def traced_by_somebody_who_contains_errors() -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(TookTooLongError, match="processor time"), at_most(0.05):
        traced_by_somebody_who_contains_errors()


def test_other_numbers_are_drawn_alike_each_time_and_are_not_those_of_the_entry() -> None:
    plain, numbers = census.entry("transformers gpt2"), Redrawing(seed=5, spread=0.15, dtype="bfloat16")
    entries = [numbers.of(plain) for _ in range(2)]
    assert {entry.name for entry in entries} == {"transformers gpt2 (seed 5, spread 0.15, bfloat16)"}
    (one, same), usual = ([list(entry.build().parameters()) for entry in entries], list(plain.build().parameters()))
    assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in zip(one, same, strict=True))
    matrices = [(a.float(), b) for a, b in zip(one, usual, strict=True) if a.dim() == 2]
    assert all(float(a.detach().std()) == pytest.approx(0.15, rel=0.2) and not torch.equal(a, b) for a, b in matrices)
    words, others = (e.cases(e.build())[0].given["input_ids"] for e in (plain, entries[0]))
    assert not torch.equal(words, others)
    assert torch.equal(words.sort().values, others.sort().values)
    assert Redrawing().of(plain) is plain


def test_a_spread_is_judged_and_recorded_under_its_numbers() -> None:
    record = look_at("transformers gpt2", Redrawing(seed=5, spread=0.6))
    assert record["name"] == "transformers gpt2 (seed 5, spread 0.6, float32)"
    assert (record["wrong"], record["skipped"]) == ([], {})
    assert {way: set(how.values()) for way, how in record["layers"].items()} == {"keep": {"counted"}}
