"""What a call makes of its scores is computed again on sampled rows: the counts are those of the whole matrix."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.probing import EVERY_ROW, probed, tensors
from tests.monitor.test_masks import FORMS, assert_counts, padded, truth, written
from torch import Tensor

from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor.attention.probe import Sampling
from foreshock.monitor.attention.probed_rows import UnmeasurableError

SLOPES = torch.tensor([0.5, 0.1, 2.0, 0.02])
CAP = 12.0


def alibi(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return scores - SLOPES[head] * (query - key).abs()


def capped(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (scores / CAP).tanh() * CAP


def same_words(words: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert slot_values(expected, Slot.ROWS).min() > 0
    for slot in Slot:
        got, wanted = slot_values(words, slot), slot_values(expected, slot)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=slot.name)


@pytest.mark.parametrize("rows", [5, 40, EVERY_ROW])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_a_function_of_the_scores_counts_as_the_same_bias_in_a_mask(causal: Any, rows: int) -> None:
    query, key, value, grad = tensors(torch.bfloat16, seed=rows)
    position = torch.arange(24, dtype=torch.int32)
    bias = alibi(torch.zeros(()), position, torch.arange(4).view(-1, 1, 1), position[:, None], position)
    options: dict[str, Any] = {"causal": causal, "window": (9, -1)}
    words = probed(query, key, value, grad, grad, Sampling(rows, strict=True), 3, score_mod=alibi, **options)
    masked = probed(query, key, value, grad, grad, Sampling(rows, strict=True), 3, mask=bias, **options)
    same_words(words, masked)


@pytest.mark.parametrize("offset", [2.0, 40.0])
def test_a_function_that_bends_the_scores_counts_as_a_softcap_and_hides_nothing(offset: float) -> None:
    arguments = tensors(
        torch.float32, offset=offset
    )  # scores of 6,400 that a cap of 12 lowers by more than a mask does
    options: dict[str, Any] = {"causal": "top_left", "numerics": "float32"}
    words = probed(*arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=capped, **options)
    same_words(words, probed(*arguments, arguments[0], Sampling(EVERY_ROW), softcap=CAP, **options))
    assert slot_values(words, Slot.ROWS).tolist() == [3 * 24] * 4


@pytest.mark.parametrize("form", FORMS)
def test_a_function_hides_a_key_with_any_number_that_masks_are_written_with(form: str) -> None:
    query, key, value, grad = tensors(torch.float32)
    causal, real = padded(24, 3, torch.Generator().manual_seed(1))
    mask = written(causal & real, "-inf" if form == "bool" else form)

    def masked(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return scores + mask[batch, 0, query, key]

    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), score_mod=masked, numerics="float32")
    assert_counts(words, truth(query, key, causal & real), 2e-6)


def test_each_score_is_given_the_numbers_of_its_entry_head_query_and_key() -> None:
    query, key, value, grad = tensors(torch.float64)
    table = torch.randn(3, 4, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def looked_up(scores: Tensor, *where: Tensor) -> Tensor:
        return scores + table[tuple(x.long() for x in where)]

    options: dict[str, Any] = {"numerics": "float64", "causal": "top_left"}
    words = probed(query, key, value, grad, grad, Sampling(30, strict=True), 4, score_mod=looked_up, **options)
    same_words(words, probed(query, key, value, grad, grad, Sampling(30), 4, mask=table, **options), 1e-12)


def test_what_a_function_returns_is_never_written_into() -> None:
    arguments = tensors(torch.float32)
    held = torch.zeros(())

    def forgets(scores: Tensor, *where: Tensor) -> Tensor:
        return held.expand_as(scores)

    words = probed(*arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=forgets, numerics="float32")
    assert not held
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUM), 0.0, atol=1e-4)
    assert slot_values(words, Slot.SCORE_MAX).tolist() == [0.0] * 4


@pytest.mark.parametrize("strict", [True, False])
def test_a_function_that_cannot_be_computed_again_counts_nothing_and_the_probe_goes_on(strict: bool) -> None:
    def fails(scores: Tensor, *where: Tensor) -> Tensor:
        raise UnmeasurableError

    arguments = tensors(torch.float32)
    sampling = Sampling(EVERY_ROW, strict=strict)
    words = probed(*arguments, arguments[0], sampling, score_mod=fails, numerics="float32")
    assert slot_values(words, Slot.ROWS).tolist() == [0] * 4
    assert sampling.fault is None


def test_nothing_that_a_function_computes_is_recorded_for_a_gradient() -> None:
    query, key, value, grad = tensors(torch.float32)
    learned, recorded = torch.nn.Parameter(torch.zeros(4)), []

    def biased(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        recorded.append((scores + learned[head]).requires_grad)
        return scores + learned[head]

    with torch.enable_grad():
        probed(query, key, value, grad, grad, Sampling(EVERY_ROW, strict=True), score_mod=biased, numerics="float32")
    assert set(recorded) == {False}
