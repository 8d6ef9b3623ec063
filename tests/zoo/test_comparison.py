"""The zoo distinguishes errors of foreshock from chaotic models, and redraws entries reproducibly."""

import contextlib
from typing import Any

import pytest
import torch
from tests.zoo import census
from tests.zoo.judge import Entry, examine
from tests.zoo.redrawing import Redrawing
from tests.zoo.run import examine_entry
from tests.zoo.running import Case, TimeLimitExceededError, draw_weights, time_limit
from torch import Tensor, nn

from foreshock.monitor.attention.watched_layer import WatchedLayer


class Chaotic(nn.Module):
    """Attention followed by a chaotic map, which amplifies rounding to a large relative difference."""

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
def test_correct_kernels_pass_for_stable_and_chaotic_models(doublings: int) -> None:
    assert examine(_entry(doublings), ("kernels",)).wrong == []


@pytest.mark.parametrize(("doublings", "factor"), [(0, 1.001), (16, 1.001), (16, 1 + 1e-6)])
def test_wrong_attention_output_is_detected_even_in_a_chaotic_model(
    monkeypatch: pytest.MonkeyPatch, doublings: int, factor: float
) -> None:
    attend = WatchedLayer.attend

    def scaled_attend(self: WatchedLayer, *args: Any, **options: Any) -> Tensor | None:
        out = attend(self, *args, **options)
        return None if out is None else out * factor

    monkeypatch.setattr(WatchedLayer, "attend", scaled_attend)
    assert examine(_entry(doublings), ("kernels",)).wrong


def test_time_limit_is_not_suppressed_as_an_exception_of_the_model() -> None:
    def suppress_exceptions_forever() -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(TimeLimitExceededError, match="processor time"), time_limit(0.05):
        suppress_exceptions_forever()


def test_redrawn_entry_is_reproducible_and_differs_from_the_original() -> None:
    plain, numbers = census.entry("transformers gpt2"), Redrawing(seed=5, spread=0.15, dtype="bfloat16")
    entries = [numbers.of(plain) for _ in range(2)]
    assert {entry.name for entry in entries} == {"transformers gpt2 (seed 5, spread 0.15, bfloat16)"}
    (first, second), original = (
        [list(entry.build().parameters()) for entry in entries],
        list(plain.build().parameters()),
    )
    assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in zip(first, second, strict=True))
    matrices = [(a.float(), b) for a, b in zip(first, original, strict=True) if a.dim() == 2]
    assert all(float(a.detach().std()) == pytest.approx(0.15, rel=0.2) and not torch.equal(a, b) for a, b in matrices)
    original_ids, redrawn_ids = (e.cases(e.build())[0].given["input_ids"] for e in (plain, entries[0]))
    assert not torch.equal(original_ids, redrawn_ids)
    assert torch.equal(original_ids.sort().values, redrawn_ids.sort().values)
    assert Redrawing().of(plain) is plain


def test_redrawn_entry_passes_and_is_recorded_under_its_own_name() -> None:
    record = examine_entry("transformers gpt2", Redrawing(seed=5, spread=0.6))
    assert record["name"] == "transformers gpt2 (seed 5, spread 0.6, float32)"
    assert (record["wrong"], record["skipped"]) == ([], {})
    assert {way: set(how.values()) for way, how in record["layers"].items()} == {"keep": {"counted"}}
