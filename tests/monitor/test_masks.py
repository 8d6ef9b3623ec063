"""Scores are measured as the attention sees them: under masks of any form, biases, and functions of the scores."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.probing import EVERY_ROW, assert_counts, probed, scores_of, tensors, truth
from tests.monitor.transformers_models import tiny
from tests.monitor.watching import listening
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import MAX_SLOTS, Slot, slot_values
from foreshock.monitor.attention.probe import Sampling

FORMS = ("bool", "-inf", "finfo.min", "-1e9", "-65504", "-1e4")
promise = pytest.mark.promise("A20")


def written(seen: Tensor, form: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask of what is seen as people write it."""
    if form == "bool":
        return seen
    low = torch.finfo(dtype).min if form == "finfo.min" else float(form)
    return torch.zeros(seen.shape).masked_fill(~seen, low).to(dtype)


def twice(causal: Tensor, real: Tensor, form: str) -> Tensor:
    """Causality and padding as two masks, added."""
    if form == "bool":
        return causal & real
    return written(causal, form) + written(real, form)


def padded(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Causality [S, S], and which keys are real [B, 1, 1, S]: padding on the left, on the right or in between."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    real = torch.rand(batch, 1, 1, length, generator=generator) < 0.6
    real[0, ..., :3] = False
    real[-1, ..., -3:] = False
    return causal, real


@promise
@pytest.mark.parametrize(
    ("dtype", "added_twice", "seed"),
    [
        *((torch.float32, added_twice, seed) for added_twice in (False, True) for seed in range(3)),
        (torch.bfloat16, False, 1),
        (torch.float16, False, 1),  # -1e9 is -inf in fp16
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_in_any_form_hides_what_a_bool_hides(
    form: str, dtype: torch.dtype, added_twice: bool, seed: int
) -> None:
    query, key, value, grad = tensors(dtype, seed=seed)
    causal, real = padded(24, 3, torch.Generator().manual_seed(seed))
    mask = twice(causal, real, form) if added_twice else written(causal & real, form, dtype)
    numerics: Any = "float32" if dtype == torch.float32 else "kernel"
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics=numerics)
    expected = truth(scores_of(query, key, causal & real))
    assert expected[Slot.EMPTY_ROWS].min() >= 3  # padding on the left leaves rows that see nothing
    assert_counts(words, expected, 2e-6)


@promise
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing_leave_the_delta_bias_alone(form: str) -> None:
    query, key, value, grad = tensors(torch.bfloat16, kv_heads=4)
    seen = torch.ones(3, 1, 24, 24, dtype=torch.bool).tril()
    seen[1] = False  # one entry of the batch is padding throughout
    mask = written(seen, form)
    out = F.scaled_dot_product_attention(query, key, value, seen).nan_to_num()
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask)
    query, key, value, grad, out, seen = (x[[0, 2]] for x in (query, key, value, grad, out, seen))
    alone = probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=seen)
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [24] * 4
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS, Slot.DELTA_BIAS_SUMSQ, *MAX_SLOTS):
        np.testing.assert_allclose(slot_values(words, slot), slot_values(alone, slot), rtol=1e-6, err_msg=slot.name)


def alibi(slope: float, length: int = 24) -> Tensor:
    """Distances times a slope, [S, S], of which the future is hidden."""
    distance = torch.arange(length).view(-1, 1) - torch.arange(length)
    return (-slope * distance).masked_fill(distance < 0, -math.inf).double()


def offset_under(bias: Tensor) -> float:
    """Mean offset of the first head, in float64."""
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=bias, numerics="float64")
    offset = slot_values(words, Slot.SCORE_OFFSET_SUM) / slot_values(words, Slot.ROWS)
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [0] * 4
    return float(offset[0])


@pytest.mark.full
@promise
def test_the_far_keys_of_an_alibi_are_seen_and_the_offset_never_jumps() -> None:
    query, key, _, _ = tensors(torch.float64, kv_heads=4)
    gentle = alibi(2.0)  # up to -46: far, and no mask
    scores = (query @ key.mT / 4)[:, 0] + gentle
    expected = (scores.logsumexp(-1) - torch.arange(1, 25).double().log()).mean()
    assert offset_under(gentle) == pytest.approx(float(expected), rel=1e-12)
    slopes = np.arange(70.0, 110.0, 0.02)  # where the neighbour goes out of sight in every row
    offsets = np.array([offset_under(alibi(float(slope))) for slope in slopes])
    assert np.ptp(offsets) > 0.5
    assert np.abs(np.diff(offsets)).max() < 2 * 0.02


@promise
def test_a_bias_that_all_keys_of_a_row_share_says_nothing_of_a_head() -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    steep, rows = alibi(0.5), torch.arange(24.0).double().view(-1, 1)
    counted = []
    for shared in (0.0, 400.0, -300.0, 50 * rows, -40 * rows.flip(0)):
        mask = (steep + shared).float()
        out = F.scaled_dot_product_attention(query, key, value, mask)
        counted.append(probed(query, key, value, grad, out, Sampling(EVERY_ROW), mask=mask, numerics="float32"))
        assert not counted[-1][:, Slot.WRONG_ROWS].any()
        for slot in (Slot.ROWS, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ, Slot.ENTROPY_SUM):
            first, last = slot_values(counted[0], slot), slot_values(counted[-1], slot)
            np.testing.assert_allclose(last, first, rtol=2e-4, err_msg=slot.name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bias_that_is_not_finite_makes_rows_that_are_not_finite(bad: float) -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    mask = torch.zeros(24, 24)
    mask[3, 5] = bad
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), mask=mask, numerics="float32")
    assert slot_values(words, Slot.NONFINITE_ROWS).tolist() == [3] * 4
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [0] * 4


CAP = 12.0


def capped(scores: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (scores / CAP).tanh() * CAP


def same_words(words: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert slot_values(expected, Slot.ROWS).min() > 0
    for slot in Slot:
        got, wanted = slot_values(words, slot), slot_values(expected, slot)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=slot.name)


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
    assert_counts(words, truth(scores_of(query, key, causal & real)), 2e-6)


def test_what_a_function_returns_is_never_written_into() -> None:
    arguments = tensors(torch.float32)
    held = torch.zeros(())

    def forgets(scores: Tensor, *where: Tensor) -> Tensor:
        return held.expand_as(scores)

    words = probed(*arguments, arguments[0], Sampling(EVERY_ROW, strict=True), score_mod=forgets, numerics="float32")
    assert not held
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUM), 0.0, atol=1e-4)
    assert slot_values(words, Slot.SCORE_MAX).tolist() == [0.0] * 4


def test_nothing_that_a_function_computes_is_recorded_for_a_gradient() -> None:
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
OF_DISTANCES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16,
    "position_embeddings_type": "relative_key", "feature_projection_input_dim": 10,
    "left_max_position_embeddings": 3, "right_max_position_embeddings": 2,
}  # fmt: skip
BIASED: dict[str, Any] = {
    "T5": (
        lambda: tiny("T5", "Model", d_model=24, d_kv=8, d_ff=16, **SIZES),
        {"input_ids": torch.arange(3, 21, 2).view(1, -1), "decoder_input_ids": torch.arange(4, 14, 2).view(1, -1)},
    ),
    "a product of distance and query": (
        lambda: tiny("Wav2Vec2Bert", "Model", **OF_DISTANCES),
        {"input_features": torch.randn(1, LENGTH, 10, generator=torch.Generator().manual_seed(41))},
    ),
}


def true_scores(model: Any, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the eager attention of each layer takes the softmax of, [H, Sq, Sk], in the order of the layers."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    scores, softmax = [], nn.functional.softmax

    def recording(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores.append(x[0].detach().double())
        return softmax(x, *args, **kwargs)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(nn.functional, "softmax", recording)
        model(**given)
    return scores


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", BIASED)
def test_a_position_bias_is_part_of_the_scores_that_are_measured(
    kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, given = BIASED[kind]
    model: Any = make()
    expected = true_scores(model, given, monkeypatch)
    model.set_attn_implementation(implementation)
    with listening(model, attention="keep", probe_rows=EVERY_ROW) as (agent, listener):
        torch.autograd.backward(model(**given).last_hidden_state.square().mean())
        agent.step(1.0)
        assert "native attention, sampled" in agent.report()
    words = listener.of(wire.Sample)[0].words()
    assert len(expected) == len(words) // 3 > 1
    for number, scores in enumerate(expected):
        hidden = scores < torch.finfo(torch.float32).min / 2  # by the decoder's causal mask
        of_layer = truth(scores.masked_fill(hidden, -math.inf)[None])
        assert_counts(words[3 * number : 3 * number + 3], of_layer, 1e-4, Slot.ROWS, Slot.SCORE_OFFSET_SUM)
