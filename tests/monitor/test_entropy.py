"""The entropy of attention's rows: what a sample of them says of it, and where it is told."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.doubles import Listener
from tests.monitor.probing import EVERY_ROW, probed, tensors
from tests.monitor.tiny_models import tiny_gpt, train_step
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.metrics.catalog import read
from foreshock.contract.slots import Floats, Slot, Words, fitted, merge_words, slot_values
from foreshock.kernels.flash_attention import flash_attention, new_state
from foreshock.monitor import attach
from foreshock.monitor.attention.probe import Sampling


def of_row(scores: list[float]) -> float:
    """-sum P log P, one key after the other."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    shares = [weight / math.fsum(weights) for weight in weights]
    return -math.fsum(share * math.log(share) for share in shares if share > 0)


def sees(row: int, column: int, queries: int, keys: int, options: dict[str, Any]) -> bool:
    causal, (left, right) = options.get("causal", "none"), options.get("window", (-1, -1))
    diagonal = row + (0 if causal == "top_left" else keys - queries)
    seen = (causal == "none" or column <= diagonal) and (right < 0 or column <= diagonal + right)
    return seen and (left < 0 or column >= diagonal - left)


def truth(query: Tensor, key: Tensor, options: dict[str, Any], mask: Tensor | None = None) -> list[list[float]]:
    """The entropy of every row that sees a key, by head."""
    query, key = query.double(), key.double()
    batch, heads, queries, dim = query.shape
    group, keys, softcap = heads // key.shape[1], key.shape[2], options.get("softcap", 0.0)
    found: list[list[float]] = [[] for _ in range(heads)]
    for entry in range(batch):
        for head in range(heads):
            for row in range(queries):
                scores = [
                    float(query[entry, head, row] @ key[entry, head // group, column]) / math.sqrt(dim)
                    for column in range(keys)
                    if sees(row, column, queries, keys, options) and (mask is None or bool(mask[entry, 0, row, column]))
                ]
                scores = [softcap * math.tanh(s / softcap) for s in scores] if softcap else scores
                found[head] += [of_row(scores)] if scores else []
    return found


def assert_entropies(words: Words, expected: list[list[float]], rtol: float) -> None:
    assert slot_values(words, Slot.ENTROPY_ROWS).tolist() == [len(of_head) for of_head in expected]
    total = [math.fsum(of_head) for of_head in expected]
    np.testing.assert_allclose(slot_values(words, Slot.ENTROPY_SUM), total, rtol=rtol, atol=rtol)
    mean = [math.fsum(of_head) / len(of_head) for of_head in expected]
    np.testing.assert_allclose(read("head.entropy", words), mean, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left"},
        {"causal": "bottom_right", "window": (5, -1)},
        {"window": (3, 2)},
        {"causal": "top_left", "softcap": 5.0},
    ],
)
@pytest.mark.parametrize(
    ("dtype", "numerics", "rtol"), [(torch.float64, "float64", 1e-12), (torch.bfloat16, "kernel", 3e-6)]
)
def test_entropies_are_those_of_a_float64_loop(
    dtype: torch.dtype, numerics: Any, rtol: float, options: dict[str, Any]
) -> None:
    query, key, value, grad = (x[:1] for x in tensors(dtype, length=12))
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), numerics=numerics, **options)
    assert_entropies(words, truth(query, key, options), rtol)
    alike = probed(torch.zeros_like(query), key, value, grad, grad, Sampling(EVERY_ROW), numerics=numerics, **options)
    most = slot_values(alike, Slot.ENTROPY_SUM)  # scores that are all 0 look at every key alike
    np.testing.assert_allclose(slot_values(words, Slot.MOST_ENTROPY_SUM), most, rtol=3e-6)


@pytest.mark.parametrize("kind", ["bool", "-inf", "-1e9"])
def test_a_row_that_a_mask_hides_from_every_key_has_no_entropy_and_is_not_counted(kind: str) -> None:
    query, key, value, grad = tensors(torch.float64, length=10)
    seen = torch.rand(3, 1, 10, 10, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[..., 0] = True
    seen[1, :, 5] = False
    mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float(kind))
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics="float64")
    assert slot_values(words, Slot.ENTROPY_ROWS).tolist() == [3 * 10 - 1] * 4
    assert_entropies(words, truth(query, key, {}, seen), 1e-12)
    most = np.log([int(row.sum()) for row in seen.flatten(0, -2) if row.any()]).sum()
    np.testing.assert_allclose(slot_values(words, Slot.MOST_ENTROPY_SUM), most, rtol=1e-12)


def entropies(query: Tensor, key: Tensor, **options: Any) -> Floats:
    grad = torch.ones_like(query)
    words = probed(query, key, key, grad, grad, Sampling(EVERY_ROW), **{"numerics": "float64", **options})
    return read("head.entropy", words)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(0.0, 1e3), st.sampled_from(["float32", "float64"]))
def test_an_entropy_lies_between_0_and_the_logarithm_of_the_keys(seed: int, keys: int, size: float, how: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if how == "float32" else torch.float64
    query = torch.randn(1, 2, 3, 4, generator=generator).to(dtype) * size
    key = torch.randn(1, 1, keys, 4, generator=generator).to(dtype)
    found = entropies(query, key, numerics=how)
    assert (found >= 0).all()
    assert (found <= math.log(keys) + 1e-6).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(-1e3, 1e3))
def test_an_offset_that_all_scores_of_a_row_share_does_not_move_it(seed: int, keys: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.float64)
    key = torch.randn(1, 1, keys, 4, generator=generator, dtype=torch.float64)
    query[..., 0] = 2.0  # so that a key's first number is an offset of every score, by 1: the scale is a half
    moved = key.clone()
    moved[..., 0] += offset
    np.testing.assert_allclose(entropies(query, moved), entropies(query, key), rtol=1e-9, atol=1e-9)


def test_a_mean_is_of_the_rows_that_were_sampled_alone() -> None:
    query, key, value, grad = tensors(torch.float32)
    state = new_state(4)
    out: Tensor = flash_attention(query.clone().requires_grad_(), key, value, state=state, numerics="float32")
    torch.autograd.backward(out, grad)
    counted = state.numpy()
    assert slot_values(counted, Slot.ROWS).min() > 0
    assert np.isnan(read("head.entropy", counted)).all()
    sampled = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), numerics="float32")
    older = fitted(sampled[:, : Slot.ENTROPY_ROWS])
    assert np.isnan(read("head.entropy", older)).all()
    merged = merge_words([counted, sampled, older])
    np.testing.assert_array_equal(read("head.entropy", merged), read("head.entropy", sampled))


@pytest.mark.parametrize(("attention", "known"), [("keep", True), ("kernels", False)])
def test_samples_of_a_training_tell_it_where_attention_is_kept(attention: Any, known: bool) -> None:
    listener, model = Listener(), tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    every: dict[str, Any] = {
        "sample_every_steps": 1,
        "sample_every_seconds": 0.0,
        "quiet": True,
        "spool_directory": None,
    }
    with attach(model, attention=attention, **every) as agent:
        agent.subscribe(listener)
        for step in range(3):
            agent.step(train_step(model, optimizer, step))
    found = [
        read("head.entropy", words) for sample in listener.of(wire.Sample) if (words := sample.words()) is not None
    ]
    assert found
    assert (np.isfinite(found) if known else np.isnan(found)).all()
    assert not known or 0 < np.min(found) <= np.max(found) < math.log(64)
