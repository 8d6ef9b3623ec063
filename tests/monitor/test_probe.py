"""The probe against brute force and against our own kernels: what it counts, and how its rows are drawn."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SUM_SLOTS, Slot, Words, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.monitor.attention.keep_attention import sampling_errors
from foreshock.monitor.attention.probe import Sampling, new_ticks, probe, probe_rows, start_sampling, stop_sampling
from foreshock.monitor.attention.probed_rows import drawn


def tensors(
    dtype: torch.dtype, *, heads: int = 4, kv_heads: int = 2, length: int = 24, offset: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and the output's gradient; scores drift by `offset`, so that rows tie once rounded."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randn(3, length, count, 16, generator=generator).transpose(1, 2)

    query, key, value, grad = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    query, key = query.round(decimals=0) + offset, key.round(decimals=0) + offset
    return tuple(x.to(dtype) for x in (query, key, value, grad))  # type: ignore[return-value]


def probed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    out: Tensor,
    sampling: Sampling,
    times: int = 1,
    **options: Any,
) -> Words:
    """The state after `times` backwards through a probe of `out`, as the words travel."""
    state, tick, number = new_state(query.shape[1]), new_ticks(1, query.device)[0], start_sampling(sampling)
    try:
        leaf = out.detach().requires_grad_()
        for _ in range(times):
            watched = probe(leaf, query, key, value, state, tick, number, **options)
            assert torch.equal(watched.nan_to_num(), out.nan_to_num())
            (given,) = torch.autograd.grad(watched, leaf, grad)
            assert given is grad or torch.equal(given, grad)
    finally:
        stop_sampling(number)
    return state.numpy()


EVERY_ROW = 10**6


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
    theirs = probed(query, key, value, grad, out.detach(), Sampling(EVERY_ROW, 0), numerics=numerics, **options)
    assert slot_values(ours, Slot.TIED_ROWS_BF16).min() > 0
    for slot in (*COUNT_SLOTS, *MAX_SLOTS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
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
        Sampling(EVERY_ROW, 0),
        numerics="float64",
        cu_seqlens=(cu_queries.int(), cu_keys.int()),
        **options,
    )
    for slot in (*COUNT_SLOTS, *MAX_SLOTS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        np.testing.assert_allclose(slot_values(theirs, slot), slot_values(state.numpy(), slot), rtol=1e-12)
    assert slot_values(theirs, Slot.EMPTY_ROWS).min() >= 4  # behind the last sequence


@pytest.mark.parametrize("kind", ["bool", "added", "as transformers writes it"])
def test_a_mask_of_any_kind_is_read_as_the_attention_reads_it(kind: str) -> None:
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    seen = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[..., 0] = True
    seen[1, :, 5] = False  # a row that sees nothing
    least = -math.inf if kind == "added" else torch.finfo(torch.float64).min
    mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, least)
    scores = (query @ key.mT / 4).masked_fill(~seen, -math.inf)
    visible = seen.sum(-1).expand(3, 4, 24)
    out = scores.softmax(-1).nan_to_num() @ value
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW, 0), mask=mask, numerics="float64")
    offset = (scores.logsumexp(-1) - visible.double().log()).nan_to_num(nan=0.0, neginf=0.0)
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUM), offset.sum((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_OFFSET_SUMSQ), offset.square().sum((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(slot_values(words, Slot.SCORE_MAX), scores.amax((0, 2, 3)), rtol=1e-12)
    assert slot_values(words, Slot.ROWS).tolist() == [3 * 24 - 1] * 4
    assert slot_values(words, Slot.EMPTY_ROWS).tolist() == [1] * 4


def test_the_bias_is_that_of_the_users_own_output() -> None:
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    out = (query @ key.mT / 4).softmax(-1) @ value
    wrong = (out + 0.25).bfloat16().double()  # under every numerics the bias is that of O in 16 bits
    words = probed(query, key, value, grad, wrong, Sampling(EVERY_ROW, 0), numerics="float64")
    truth = (grad * (wrong - out)).sum((0, 2, 3))
    np.testing.assert_allclose(slot_values(words, Slot.DELTA_BIAS_SUM), truth, rtol=1e-9)


def test_rows_that_are_not_finite_are_counted_and_kept_out_of_the_sums() -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    query[0, 1, 3] = math.nan
    grad[2, 2, 7] = math.inf
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW, 0), numerics="float32")
    assert slot_values(words, Slot.NONFINITE_ROWS).tolist() == [0, 1, 1, 0]
    assert slot_values(words, Slot.ROWS).tolist() == [72, 71, 71, 72]
    assert np.isfinite([slot_values(words, slot) for slot in SUM_SLOTS]).all()


def test_under_dropout_scores_are_measured_and_the_bias_is_not() -> None:
    query, key, value, grad = tensors(torch.float32)
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW, 0), numerics="float32", dropout_p=0.1)
    assert slot_values(words, Slot.ROWS).tolist() == [72] * 4
    assert slot_values(words, Slot.DELTA_BIAS_ABS).tolist() == [0] * 4


def test_shares_and_means_are_unbiased_and_their_standard_errors_are_those_of_independent_rows() -> None:
    query, key, value, grad = tensors(torch.bfloat16, length=40)
    out = flash_attention(query, key, value, causal="top_left")
    arguments = query, key, value, grad, out
    whole = probed(*arguments, Sampling(EVERY_ROW, 0), causal="top_left")
    rows, times = 8, 400
    total = probed(*arguments, Sampling(rows, 0), times, causal="top_left")
    counted = slot_values(total, Slot.ROWS)
    assert counted.tolist() == [rows * times] * 4
    for slot, square in ((Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ), (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_BF16)):
        truth, second = (slot_values(whole, s) / slot_values(whole, Slot.ROWS) for s in (slot, square))
        error = np.sqrt((second - truth**2) / counted)
        assert (error > 0).all()
        z = (slot_values(total, slot) / counted - truth) / error
        assert (np.abs(z) < 4).all(), z


def test_the_sampling_error_that_is_shown_is_the_spread_of_many_samples() -> None:
    query, key, value, grad = tensors(torch.bfloat16, length=40)
    out = flash_attention(query, key, value, causal="top_left")
    state, tick, number = new_state(4), new_ticks(1, torch.device("cpu"))[0], start_sampling(Sampling(30, 0))
    leaf = out.detach().requires_grad_()
    offsets, ties, shown = [], [], []
    for _ in range(150):
        state.copy_(new_state(4))
        watched = probe(leaf, query, key, value, state, tick, number, causal="top_left")
        torch.autograd.backward(watched, grad)
        words = state.numpy().copy()
        offsets.append(slot_values(words, Slot.SCORE_OFFSET_SUM) / 30)
        ties.append(slot_values(words, Slot.TIED_ROWS_BF16) / 30)
        shown.append([sampling_errors(words)[name] for name in ("offset_error", "tied_bf16_error")])
    stop_sampling(number)
    spread = np.array([np.std(offsets, axis=0), np.std(ties, axis=0)])
    np.testing.assert_allclose(np.mean(shown, axis=0), spread, rtol=0.2)


def test_numbers_are_drawn_evenly_and_anew_at_every_tick() -> None:
    below, ticks = 24, 2000
    seen = np.zeros((4, below))
    tick = new_ticks(3, torch.device("cpu"))[2]
    for _ in range(ticks):
        numbers = drawn(tick, (4, 6), below)
        for head in range(4):
            seen[head] += np.bincount(numbers[head], minlength=below)
        tick += 1
    expected = ticks * 6 / below
    chi_square = ((seen - expected) ** 2 / expected).sum(1)
    assert (chi_square < 55).all()  # 23 degrees of freedom: 1 in 10,000
    assert (chi_square > 5).all()


def test_no_two_layers_draw_the_same_rows() -> None:
    first, second = (drawn(tick, (2, 64), 10**9) for tick in new_ticks(2, torch.device("cpu")))
    assert not set(first.flatten().tolist()) & set(second.flatten().tolist())


def test_heads_are_measured_in_turn() -> None:
    query, key, value, grad = tensors(torch.float32)
    out = flash_attention(query, key, value, numerics="float32")
    words = probed(query, key, value, grad, out, Sampling(5, 3), times=4, numerics="float32")
    assert slot_values(words, Slot.ROWS).tolist() == [15] * 4
    once = probed(query, key, value, grad, out, Sampling(5, 3), numerics="float32")
    assert slot_values(once, Slot.ROWS).tolist() == [5, 5, 5, 0]


def test_the_training_draws_the_same_random_numbers_with_the_probe_as_without() -> None:
    query, key, value, grad = tensors(torch.float32)
    before = torch.random.get_rng_state()
    probed(query, key, value, grad, grad, Sampling(5, 0), numerics="float32")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_step_that_is_not_due_counts_nothing() -> None:
    query, key, value, grad = tensors(torch.float32)
    words = probed(query, key, value, grad, grad, Sampling(5, 0, due=False), numerics="float32")
    assert not slot_values(words, Slot.ROWS).any()


@pytest.mark.parametrize("copies", [False, True])
def test_rows_are_measured_a_part_at_a_time_to_the_same_counts(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    arguments = tensors(torch.bfloat16)
    whole = probed(*arguments, arguments[0], Sampling(EVERY_ROW, 0))
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows._copies", lambda device: copies)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.HELD_BYTES", 4 * 24 * 4 * 7 * (16 if copies else 1))
    parts = probed(*arguments, arguments[0], Sampling(EVERY_ROW, 0))
    for slot in Slot:
        np.testing.assert_allclose(slot_values(parts, slot), slot_values(whole, slot), rtol=1e-12, err_msg=slot.name)


@pytest.mark.parametrize("rows", [3, 40, EVERY_ROW])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 4, {"causal": "top_left"}),
        (6, 2, {"window": (7, 3)}),
        (3, 1, {"causal": "bottom_right", "scale": 0.3, "softcap": 12.0}),
    ],
)
def test_a_cpu_measures_without_copies_what_a_gpu_measures_with_them(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    arguments = tensors(torch.float64, heads=heads, kv_heads=kv_heads, seed=rows, offset=0.0)
    sampling = Sampling(rows, 0, strict=True)
    without = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows._copies", lambda device: True)
    copied = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    assert slot_values(copied, Slot.ROWS).min() > 0
    for slot in Slot:
        np.testing.assert_allclose(
            slot_values(without, slot), slot_values(copied, slot), rtol=1e-11, atol=1e-11, err_msg=slot.name
        )


@pytest.mark.parametrize(("dtype", "numerics"), [(torch.bfloat16, "kernel"), (torch.float32, "float32")])
def test_a_cpu_copies_no_keys_for_the_rows_that_it_measures(dtype: torch.dtype, numerics: Any) -> None:
    query, key, value, grad = (x[:2].repeat(1, 1, 8, 1) for x in tensors(dtype, heads=2, kv_heads=2))
    largest = 0

    class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            given = func(*args, **(kwargs or {}))
            if isinstance(given, Tensor):
                largest = max(largest, given.numel())
            return given

    state, tick, number = new_state(2), new_ticks(1, query.device)[0], start_sampling(Sampling(64, 0, strict=True))
    spec = AttentionSpec(0.25, "top_left", numerics=numerics).text
    try:
        with Largest():  # type: ignore[no-untyped-call]
            probe_rows(grad, grad, query, key, value, None, None, None, state, tick, number, spec, False)
    finally:
        stop_sampling(number)
    assert slot_values(state.numpy(), Slot.ROWS).tolist() == [64, 64]
    rows_by_keys = 2 * 64 * key.shape[2]
    assert largest <= 2 * rows_by_keys < rows_by_keys * key.shape[3]


@pytest.mark.parametrize("bounds", [(None, None), (torch.tensor([0, 3, 8], dtype=torch.int32),) * 2])
def test_the_operator_declares_what_it_does(bounds: Any) -> None:
    query, key, value, grad = tensors(torch.float32, length=8)
    state, tick = new_state(4), new_ticks(1, torch.device("cpu"))[0].clone()
    number = start_sampling(Sampling(3, 0))
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
                number,
                AttentionSpec(0.25, "top_left", numerics="float32").text,
                False,
            ),
        )
    finally:
        stop_sampling(number)
