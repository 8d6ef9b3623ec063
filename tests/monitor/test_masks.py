"""Measured scores include masks in all forms, biases and score functions."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.probing import EVERY_ROW, assert_counts, probed, reference_statistics, scores_of, tensors
from tests.monitor.transformers_models import tiny
from tests.monitor.watched_training import listening
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import MAX_SLOTS, Slot, slot_values
from foreshock.monitor.attention.probe import Sampling

FORMS = ("bool", "-inf", "finfo.min", "-1e9", "-65504", "-1e4")
promise = pytest.mark.promise("A20")


def mask_as(visible_keys: Tensor, form: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask of visible keys in one of the usual forms."""
    if form == "bool":
        return visible_keys
    hidden_value = torch.finfo(dtype).min if form == "finfo.min" else float(form)
    return torch.zeros(visible_keys.shape).masked_fill(~visible_keys, hidden_value).to(dtype)


def added_masks(causal: Tensor, unpadded: Tensor, form: str) -> Tensor:
    """The sum of a causal mask and a padding mask."""
    if form == "bool":
        return causal & unpadded
    return mask_as(causal, form) + mask_as(unpadded, form)


def padded(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A causal mask [S, S] and a mask of unpadded keys [B, 1, 1, S], with padding left, right and in between."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    unpadded = torch.rand(batch, 1, 1, length, generator=generator) < 0.6
    unpadded[0, ..., :3] = False
    unpadded[-1, ..., -3:] = False
    return causal, unpadded


@promise
@pytest.mark.parametrize(
    ("dtype", "sum_of_masks", "seed"),
    [
        *((torch.float32, sum_of_masks, seed) for sum_of_masks in (False, True) for seed in range(3)),
        (torch.bfloat16, False, 1),
        (torch.float16, False, 1),  # -1e9 is -inf in fp16
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_mask_in_any_form_hides_the_same_keys_as_a_bool_mask(
    form: str, dtype: torch.dtype, sum_of_masks: bool, seed: int
) -> None:
    query, key, value, grad = tensors(dtype, seed=seed)
    causal, unpadded = padded(24, 3, torch.Generator().manual_seed(seed))
    mask = added_masks(causal, unpadded, form) if sum_of_masks else mask_as(causal & unpadded, form, dtype)
    numerics: Any = "float32" if dtype == torch.float32 else "kernel"
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics=numerics)
    expected = reference_statistics(scores_of(query, key, causal & unpadded))
    assert expected[Slot.EMPTY_ROWS].min() >= 3  # padding on the left leaves rows without visible keys
    assert_counts(words, expected, 2e-6)


@promise
@pytest.mark.parametrize("form", FORMS)
def test_rows_without_visible_keys_do_not_change_the_delta_bias(form: str) -> None:
    query, key, value, grad = tensors(torch.bfloat16, kv_heads=4)
    visible_keys = torch.ones(3, 1, 24, 24, dtype=torch.bool).tril()
    visible_keys[1] = False  # one entry of the batch is only padding
    mask = mask_as(visible_keys, form)
    out = F.scaled_dot_product_attention(query, key, value, visible_keys).nan_to_num()
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask)
    query, key, value, grad, out, visible_keys = (x[[0, 2]] for x in (query, key, value, grad, out, visible_keys))
    reference = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=visible_keys)
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [24] * 4
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS, Slot.DELTA_BIAS_SUMSQ, *MAX_SLOTS):
        np.testing.assert_allclose(slot_values(words, slot), slot_values(reference, slot), rtol=1e-6, err_msg=slot.name)


def alibi(slope: float, length: int = 24) -> Tensor:
    """A causal ALiBi bias, [S, S]."""
    distance = torch.arange(length).view(-1, 1) - torch.arange(length)
    return (-slope * distance).masked_fill(distance < 0, -math.inf).double()


def offset_under(bias: Tensor) -> float:
    """Mean score offset of the first head, in float64."""
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=bias, numerics="float64")
    offset = slot_values(words, Slot.SCORE_OFFSET_SUM) / slot_values(words, Slot.ROWS)
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [0] * 4
    return float(offset[0])


@pytest.mark.full
@promise
def test_far_keys_of_alibi_stay_visible_and_the_offset_is_continuous() -> None:
    query, key, _, _ = tensors(torch.float64, kv_heads=4)
    gentle = alibi(2.0)  # up to -46, which is not masking
    scores = (query @ key.mT / 4)[:, 0] + gentle
    expected = (scores.logsumexp(-1) - torch.arange(1, 25).double().log()).mean()
    assert offset_under(gentle) == pytest.approx(float(expected), rel=1e-12)
    slopes = np.arange(70.0, 110.0, 0.02)  # in this range the neighbouring key becomes hidden in all rows
    offsets = np.array([offset_under(alibi(float(slope))) for slope in slopes])
    assert np.ptp(offsets) > 0.5
    assert np.abs(np.diff(offsets)).max() < 2 * 0.02


@promise
def test_bias_shared_by_all_keys_of_a_row_does_not_change_statistics() -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    steep, rows = alibi(0.5), torch.arange(24.0).double().view(-1, 1)
    results = []
    for shared in (0.0, 400.0, -300.0, 50 * rows, -40 * rows.flip(0)):
        mask = (steep + shared).float()
        out = F.scaled_dot_product_attention(query, key, value, mask)
        results.append(probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask, numerics="float32"))
        assert not results[-1][:, Slot.WRONG_ROWS].any()
        for slot in (Slot.ROWS, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ, Slot.ENTROPY_SUM):
            first, last = slot_values(results[0], slot), slot_values(results[-1], slot)
            np.testing.assert_allclose(last, first, rtol=2e-4, err_msg=slot.name)


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf])
def test_nonfinite_bias_makes_its_rows_nonfinite(nonfinite: float) -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    mask = torch.zeros(24, 24)
    mask[3, 5] = nonfinite
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics="float32")
    assert slot_values(words, Slot.NONFINITE_ROWS).tolist() == [3] * 4
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [0] * 4


CAP = 12.0


def capped(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (scores / CAP).tanh() * CAP


def assert_same_statistics(words: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert slot_values(expected, Slot.ROWS).min() > 0
    for slot in Slot:
        got, expected_values = slot_values(words, slot), slot_values(expected, slot)
        np.testing.assert_allclose(got, expected_values, rtol=tolerance, atol=tolerance, err_msg=slot.name)


@pytest.mark.parametrize("offset", [2.0, 40.0])
def test_score_mod_with_tanh_counts_like_softcap_and_hides_nothing(offset: float) -> None:
    arguments = tensors(
        torch.float32, offset=offset
    )  # scores of 6,400 that a cap of 12 lowers by more than a mask does
    options: dict[str, Any] = {"causal": "top_left", "numerics": "float32"}
    words = probed(*arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=capped, **options)
    assert_same_statistics(words, probed(*arguments, arguments[0], Sampling(EVERY_ROW), softcap=CAP, **options))
    assert slot_values(words, Slot.ROWS).tolist() == [3 * 24] * 4


@pytest.mark.parametrize("form", FORMS)
def test_score_mod_can_hide_keys_with_any_mask_value(form: str) -> None:
    query, key, value, grad = tensors(torch.float32)
    causal, unpadded = padded(24, 3, torch.Generator().manual_seed(1))
    mask = mask_as(causal & unpadded, "-inf" if form == "bool" else form)

    def masked(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return scores + mask[batch, 0, query, key]

    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), score_mod=masked, numerics="float32")
    assert_counts(words, reference_statistics(scores_of(query, key, causal & unpadded)), 2e-6)


def test_result_of_score_mod_is_not_modified_in_place() -> None:
    arguments = tensors(torch.float32)
    constant = torch.zeros(())

    def constant_scores(scores: Tensor, *where: Tensor) -> Tensor:
        return constant.expand_as(scores)

    words = probed(
        *arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=constant_scores, numerics="float32"
    )
    assert not constant
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUM), 0.0, atol=1e-4)
    assert slot_values(words, Slot.SCORE_MAX).tolist() == [0.0] * 4


def test_score_mod_runs_without_gradients() -> None:
    query, key, value, grad = tensors(torch.float32)
    learned, recorded = torch.nn.Parameter(torch.zeros(4)), []

    def biased(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        recorded.append((scores + learned[head]).requires_grad)
        return scores + learned[head]

    with torch.enable_grad():
        probed(query, key, value, grad, grad, Sampling(EVERY_ROW, strict=True), score_mod=biased, numerics="float32")
    assert set(recorded) == {False}


LENGTH = 9
SIZES: dict[str, Any] = {"num_heads": 3, "num_layers": 2, "num_decoder_layers": 1, "dropout_rate": 0.0}
WAV2VEC2_SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16,
    "position_embeddings_type": "relative_key", "feature_projection_input_dim": 10,
    "left_max_position_embeddings": 3, "right_max_position_embeddings": 2,
}  # fmt: skip
BIASED: dict[str, Any] = {
    "T5": (
        lambda: tiny("T5", "Model", d_model=24, d_kv=8, d_ff=16, **SIZES),
        {"input_ids": torch.arange(3, 21, 2).view(1, -1), "decoder_input_ids": torch.arange(4, 14, 2).view(1, -1)},
    ),
    "bias from distance and query": (
        lambda: tiny("Wav2Vec2Bert", "Model", **WAV2VEC2_SIZES),
        {"input_features": torch.randn(1, LENGTH, 10, generator=torch.Generator().manual_seed(41))},
    ),
}


def true_scores(model: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of each layer's softmax under eager attention, [H, Sq, Sk]."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    scores, softmax = [], nn.functional.softmax

    def recording(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores.append(x[0].detach().double())
        return softmax(x, *args, **kwargs)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(nn.functional, "softmax", recording)
        model(**inputs)
    return scores


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", BIASED)
def test_measured_scores_include_position_biases(
    kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs = BIASED[kind]
    model: Any = make()
    expected = true_scores(model, inputs, monkeypatch)
    model.set_attn_implementation(implementation)
    with listening(model, attention="keep", probe_rows=EVERY_ROW) as (agent, listener):
        torch.autograd.backward(model(**inputs).last_hidden_state.square().mean())
        agent.step(1.0)
        assert "native attention, sampled" in agent.report()
    words = listener.of(wire.Sample)[0].words()
    assert len(expected) == len(words) // 3 > 1
    for number, scores in enumerate(expected):
        hidden = scores < torch.finfo(torch.float32).min / 2  # hidden by the decoder's causal mask
        layer_statistics = reference_statistics(scores.masked_fill(hidden, -math.inf)[None])
        assert_counts(words[3 * number : 3 * number + 3], layer_statistics, 1e-4, Slot.ROWS, Slot.SCORE_OFFSET_SUM)
