"""Properties that hold for any attention: of softmax, of the statistics, of the heads."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreshock.contract.modes import all_modes
from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SUM_SLOTS, Slot, Words, merge_words, slot_values
from foreshock.kernels.flash_attention import Numerics, flash_attention, new_state

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
NUMERICS: st.SearchStrategy[Numerics] = st.sampled_from(("kernel", "paper", "float32", "float64"))
SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from((0.01, 1.0, 10.0, 100.0))


def tensors(seed: int, batch: int, heads: int, queries: int, keys: int, size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, 8), (batch, heads, keys, 8), (batch, heads, keys, 8), (batch, heads, queries, 8)]
    made = [torch.randn(*shape, generator=generator) for shape in shapes]
    made[0] = (made[0] * size * 2).round() / 2  # a coarse grid, so that some rows tie
    return [x.bfloat16() for x in made]


def run(inputs: list[Tensor], numerics: Numerics, modes: Tensor) -> tuple[list[Tensor], Tensor]:
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    state = new_state(query.shape[1])
    out, lse = flash_attention(
        query, key, value, causal="top_left", numerics=numerics, state=state, modes=modes, return_lse=True
    )
    return [out.detach(), lse, *torch.autograd.grad(out, (query, key, value), inputs[3])], state


def modes_of(heads: int, seed: int) -> Tensor:
    choices = all_modes()
    return torch.tensor([int(choices[(seed + i) % len(choices)]) for i in range(heads)], dtype=torch.int32)


def assert_same_statistics(got: Words, expected: Words) -> None:
    """Equal counts; sums and maxima as near as fp32 rows are, whose last bit depends on where in memory a row lies."""
    np.testing.assert_array_equal(got[:, list(COUNT_SLOTS)], expected[:, list(COUNT_SLOTS)])
    for slot in MAX_SLOTS + SUM_SLOTS:
        # A sum of both signs is as exact as the sum of absolutes that goes with it.
        scale = {Slot.DELTA_BIAS_SUM: Slot.DELTA_BIAS_ABS, Slot.SCORE_OFFSET_SUM: Slot.SCORE_OFFSET_SUMSQ}.get(
            slot, slot
        )
        tolerance = 1e-6 * np.abs(slot_values(expected, scale)).max()
        if scale == Slot.DELTA_BIAS_ABS:  # what is left of O after its rounding, to the last bit of O in fp32
            tolerance += 2.0**-22 * slot_values(expected, Slot.ROWS).max()
        np.testing.assert_allclose(slot_values(got, slot), slot_values(expected, slot), rtol=1e-5, atol=tolerance)


@QUICK
@given(SEEDS, SIZES, st.integers(1, 40), st.integers(1, 40))
def test_a_constant_added_to_every_key_of_a_head_changes_no_output(
    seed: int, size: float, queries: int, keys: int
) -> None:
    *inputs, _ = tensors(seed, 1, 2, queries, keys, size)
    query, key, value = (x.double() for x in inputs)
    shifted = key + torch.tensor([3.0, -7.0], dtype=torch.float64).view(1, 2, 1, 1)
    plain, lse = flash_attention(query, key, value, numerics="float64", return_lse=True)
    moved, moved_lse = flash_attention(query, shifted, value, numerics="float64", return_lse=True)
    torch.testing.assert_close(moved, plain, rtol=1e-9, atol=1e-9)
    offset = (query * torch.tensor([3.0, -7.0], dtype=torch.float64).view(1, 2, 1, 1)).sum(-1) / math.sqrt(8)
    torch.testing.assert_close(moved_lse - lse, offset, rtol=1e-9, atol=1e-9)


@QUICK
@given(SEEDS, SIZES, NUMERICS, st.integers(2, 5), st.integers(1, 30))
def test_states_of_a_split_batch_merge_to_the_state_of_the_whole(
    seed: int, size: float, numerics: Numerics, batch: int, length: int
) -> None:
    inputs = tensors(seed, batch, 3, length, length, size)
    modes = modes_of(3, seed)
    _, whole = run(inputs, numerics, modes)
    parts = [run([x[:1] for x in inputs], numerics, modes)[1], run([x[1:] for x in inputs], numerics, modes)[1]]
    merged = merge_words([part.numpy() for part in parts])
    assert_same_statistics(merged, whole.numpy())


@QUICK
@given(SEEDS, SIZES, NUMERICS, st.permutations(range(6)))
def test_permuted_heads_give_permuted_results(seed: int, size: float, numerics: Numerics, order: list[int]) -> None:
    inputs = tensors(seed, 2, 6, 17, 17, size)
    modes = modes_of(6, seed)
    results, state = run(inputs, numerics, modes)
    permuted, permuted_state = run([x[:, order] for x in inputs], numerics, modes[order])
    assert all(torch.equal(a[:, order], b) for a, b in zip(results, permuted, strict=True))
    assert_same_statistics(permuted_state.numpy(), state[order].numpy())


@QUICK
@given(SEEDS, SIZES, NUMERICS, st.integers(1, 40), st.integers(1, 40))
def test_the_log_sum_exp_lies_between_the_row_max_and_log_n_above_it(
    seed: int, size: float, numerics: Numerics, queries: int, keys: int
) -> None:
    inputs = tensors(seed, 1, 6, queries, keys, size)
    query, key = inputs[0].double(), inputs[1].double()
    modes = modes_of(6, seed)
    (_, lse, *_), _ = run(inputs, numerics, modes)
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(torch.ones(queries, keys).triu(1).bool(), -math.inf)
    row_max = scores.amax(-1)
    visible = torch.arange(1, queries + 1).clamp(max=keys).log()
    # paper numerics round scores and row sum to bf16
    slack = 2.0**-7 * (1 + row_max.abs()) if numerics == "paper" else 1e-5 * (1 + row_max.abs())
    assert (lse >= row_max - slack).all()
    assert (lse <= row_max + visible + slack).all()
