"""The probe against brute force and against our own kernels: what it counts, and how its rows are drawn."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.probing import EVERY_ROW, OF_SAMPLED_ROWS, probed, tensors

from foreshock.contract.slots import COUNT_SLOTS, SUM_SLOTS, Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.monitor.attention.probe import Sampling, new_ticks, start_sampling, stop_sampling
from foreshock.monitor.attention.probed_rows import sizes

OF_EVERY_ROW = [slot for slot in COUNT_SLOTS if slot not in OF_SAMPLED_ROWS]
"""What our own kernels count."""


@pytest.mark.parametrize(
    "options", [{}, {"causal": "top_left"}, {"causal": "bottom_right", "window": (5, -1), "softcap": 20.0}]
)
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [(torch.bfloat16, "kernel"), (torch.float16, "kernel"), (torch.float32, "float32"), (torch.float64, "float64")],
)
def test_with_every_row_sampled_it_counts_what_our_own_kernel_counts_on_the_same_tensors(
    dtype: torch.dtype, numerics: Any, options: dict[str, Any]
) -> None:
    query, key, value, grad = tensors(dtype)
    state = new_state(query.shape[1])
    leaf = query.clone().requires_grad_()
    out = flash_attention(leaf, key, value, numerics=numerics, state=state, **options)
    out.backward(grad)
    ours = state.numpy()
    theirs = probed(query, key, value, grad, out.detach(), Sampling(EVERY_ROW), numerics=numerics, **options)
    assert slot_values(ours, Slot.TIED_ROWS_BF16).min() > 0
    for slot in (*OF_EVERY_ROW, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        np.testing.assert_allclose(slot_values(theirs, slot), slot_values(ours, slot), rtol=2e-6, err_msg=slot.name)
    # Our kernel reads the residual of O in 16 bits, and the probe computes it again: equal to its own rounding.
    total = slot_values(ours, Slot.DELTA_BIAS_ABS)
    assert numerics != "kernel" or total.min() > 0
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS):
        near = 0.01 * total + 1e-4
        assert (np.abs(slot_values(theirs, slot) - slot_values(ours, slot)) <= near).all(), slot.name


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (5, 2)}, {"causal": "top_left"}])
def test_rows_of_packed_sequences_see_what_our_own_kernel_shows_them(options: dict[str, Any]) -> None:
    query, key, value, grad = (x[:1] for x in tensors(torch.float64))
    cu_queries, cu_keys = torch.tensor([0, 3, 11, 20]), torch.tensor([0, 7, 9, 22])
    sequences: dict[str, Any] = {
        "cu_seqlens_q": cu_queries.int(),
        "cu_seqlens_k": cu_keys.int(),
        "max_seqlen_q": 9,
        "max_seqlen_k": 13,
    }
    state = new_state(query.shape[1])
    leaf = query.clone().requires_grad_()
    out = flash_attention(leaf, key, value, numerics="float64", state=state, **sequences, **options)
    out.backward(grad)
    theirs = probed(
        query,
        key,
        value,
        grad,
        out.detach(),
        Sampling(EVERY_ROW),
        numerics="float64",
        cu_seqlens=(cu_queries.int(), cu_keys.int()),
        **options,
    )
    for slot in (*OF_EVERY_ROW, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        np.testing.assert_allclose(slot_values(theirs, slot), slot_values(state.numpy(), slot), rtol=1e-12)
    assert slot_values(theirs, Slot.EMPTY_ROWS).min() >= 4  # behind the last sequence


def test_the_bias_is_that_of_the_users_own_output() -> None:
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    out = (query @ key.mT / 4).softmax(-1) @ value
    wrong = (out + 0.25).bfloat16().double()  # under every numerics the bias is that of O in 16 bits
    words = probed(query, key, value, grad, wrong, Sampling(EVERY_ROW), numerics="float64")
    truth = (grad * (wrong - out)).sum((0, 2, 3))
    np.testing.assert_allclose(slot_values(words, Slot.DELTA_BIAS_SUM), truth, rtol=1e-9)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_rows_are_not_finite_by_their_input_their_output_or_the_gradient(dropout_p: float) -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    query[0, 1, 3] = math.nan
    value[1, 1, 5] = math.inf
    grad[2, 2, 7] = math.inf
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    out[1, 3, 2, 0] = math.nan  # as a broken kernel gives
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW), numerics="float32", dropout_p=dropout_p)
    rows = query.shape[2]
    assert slot_values(words, Slot.NONFINITE_ROWS).tolist() == [0, 1 + rows, 1, 1]
    assert slot_values(words, Slot.NONFINITE_INPUT_ROWS).tolist() == [0, 1 + rows, 0, 0]
    assert slot_values(words, Slot.NONFINITE_OUTPUT_ROWS).tolist() == [0, 0, 0, 1]
    assert slot_values(words, Slot.ROWS).tolist() == [72, 71 - rows, 71, 71]
    assert np.isfinite([slot_values(words, slot) for slot in SUM_SLOTS]).all()


def test_under_dropout_scores_are_measured_and_the_bias_is_not() -> None:
    query, key, value, grad = tensors(torch.float32)
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), numerics="float32", dropout_p=0.1)
    assert slot_values(words, Slot.ROWS).tolist() == [72] * 4
    assert slot_values(words, Slot.DELTA_BIAS_ABS).tolist() == [0] * 4


def test_shares_and_means_are_unbiased_and_their_standard_errors_cover_what_a_sample_misses() -> None:
    query, key, value, grad = tensors(torch.bfloat16, length=40)
    out = flash_attention(query, key, value, causal="top_left")
    arguments = query, key, value, grad, out
    whole = probed(*arguments, Sampling(EVERY_ROW), causal="top_left")
    entries, of_each = sizes(20, 3, 40)
    times = 400
    total = probed(*arguments, Sampling(20), times, causal="top_left")
    counted = slot_values(total, Slot.ROWS)
    assert counted.tolist() == [entries * of_each * times] * 4
    for slot, square in ((Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ), (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_BF16)):
        truth, second = (slot_values(whole, s) / slot_values(whole, Slot.ROWS) for s in (slot, square))
        error = np.sqrt((second - truth**2) / counted)  # of independent rows; stratified ones miss less
        assert (error > 0).all()
        z = (slot_values(total, slot) / counted - truth) / error
        assert (np.abs(z) < 4).all(), z


def test_a_captured_step_measures_fewer_rows_since_each_replay_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, grad = tensors(torch.float32)
    arguments = query, key, value, grad, grad
    assert slot_values(probed(*arguments, Sampling(12, 4), numerics="float32"), Slot.ROWS).tolist() == [12] * 4
    monkeypatch.setattr("foreshock.monitor.attention.probe._capturing", lambda query: True)
    unasked = Sampling(12, 4, due=False)
    assert slot_values(probed(*arguments, unasked, numerics="float32"), Slot.ROWS).tolist() == [3] * 4
    assert unasked.captured


def test_the_training_draws_the_same_random_numbers_with_the_probe_as_without() -> None:
    query, key, value, grad = tensors(torch.float32)
    before = torch.random.get_rng_state()
    probed(query, key, value, grad, grad, Sampling(5), numerics="float32")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_step_that_is_not_due_counts_nothing() -> None:
    query, key, value, grad = tensors(torch.float32)
    words = probed(query, key, value, grad, grad, Sampling(5, due=False), numerics="float32")
    assert not slot_values(words, Slot.ROWS).any()


@pytest.mark.parametrize("bounds", [(None, None), (torch.tensor([0, 3, 8], dtype=torch.int32),) * 2])
def test_the_operator_declares_what_it_does(bounds: Any) -> None:
    query, key, value, grad = tensors(torch.float32, length=8)
    state, tick = new_state(4), new_ticks(1, torch.device("cpu"))[0].clone()
    number = start_sampling(Sampling(3))
    try:
        torch.library.opcheck(
            torch.ops.foreshock.probe_rows.default,
            (
                grad,
                grad,
                query,
                key,
                value,
                None,
                *bounds,
                state,
                tick,
                torch.full((4,), -math.inf),
                number,
                AttentionSpec(0.25, "top_left", numerics="float32").text,
                [],
            ),
        )
    finally:
        stop_sampling(number)
