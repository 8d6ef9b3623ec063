"""Statistics, compared with a float64 loop over single rows that shares no code with the kernels."""

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foreshock.contract.slots import Floats, Slot, merge_words, slot_values
from foreshock.kernels.flash_attention import flash_attention, new_state
from foreshock.kernels.flash_attention.statistics import Rows, accumulate, one_margin, several_within


def bf16(value: float) -> float:
    """Nearest bf16, ties to even, by the bits of the nearest float."""
    if not math.isfinite(value):
        return value
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    result: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return result


def oracle_row(query: Floats, keys: Floats, values: Floats, grad: Floats, case: dict[str, Any]) -> dict[Slot, float]:
    """The statistics of one row that sees `keys` [n, D], from their definitions."""
    if len(keys) == 0:
        return {Slot.EMPTY_ROWS: 1}
    scores = [float(query @ key) * case["scale"] for key in keys]
    if case["softcap"]:
        scores = [case["softcap"] * math.tanh(s / case["softcap"]) for s in scores]
    if case["numerics"] == "paper":
        scores = [bf16(s) for s in scores]
    maximum = max(scores)
    inputs_finite = all(map(math.isfinite, [*scores, *values.ravel()]))
    if not (inputs_finite and all(map(math.isfinite, grad))):
        return {Slot.NONFINITE_ROWS: 1, Slot.NONFINITE_INPUT_ROWS: int(not inputs_finite)}
    weights = [math.exp(s - maximum) for s in scores]
    rounded = [bf16(w) for w in weights]
    exact = weights @ values / math.fsum(weights)
    total = math.fsum(weights)
    if case["numerics"] == "kernel":
        exact = np.array(rounded) @ values / total
    out = [bf16(o) for o in exact]
    if case["numerics"] == "paper":
        total = bf16(math.fsum(rounded))
        out = [bf16(bf16(o) / total) for o in np.array(rounded) @ values]
    residual = exact - np.array(out)
    if case["numerics"] in ("kernel", "paper"):
        residual = np.array([bf16(r) for r in residual])
    offset = maximum + math.log(total) - math.log(len(keys))
    bias = -float(grad @ residual)
    return {
        Slot.ROWS: 1,
        Slot.TIED_ROWS_BF16: sum(bf16(s) == bf16(maximum) for s in scores) > 1,
        Slot.TIED_ROWS_ONE: sum(w == 1 for w in rounded) > 1,
        Slot.SCORE_MAX: maximum,
        Slot.ROW_MAX_ABS: abs(maximum),
        Slot.SCORE_OFFSET_SUM: offset,
        Slot.SCORE_OFFSET_SUMSQ: offset**2,
        Slot.DELTA_BIAS_SUM: bias,
        Slot.DELTA_BIAS_ABS: abs(bias),
        Slot.DELTA_BIAS_SUMSQ: bias**2,
    }


def visible(case: dict[str, Any], i: int, keys: int, queries: int) -> list[int]:
    diagonal = i + (0 if case["causal"] == "top_left" else keys - queries)
    left, right = case["window"]
    return [
        j
        for j in range(keys)
        if (case["causal"] == "none" or j <= diagonal)
        and (left < 0 or j >= diagonal - left)
        and (right < 0 or j <= diagonal + right)
    ]


def oracle(inputs: list[Tensor], case: dict[str, Any]) -> Floats:
    q, k, v, g = (x.detach().double().numpy() for x in inputs)
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    table = np.zeros((heads, len(Slot)))
    table[:, [Slot.SCORE_MAX, Slot.ROW_MAX_ABS]] = -np.inf
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = visible(case, i, k.shape[2], queries)
                row = oracle_row(q[b, h, i], k[b, h // group, seen], v[b, h // group, seen], g[b, h, i], case)
                for slot, number in row.items():
                    if slot in (Slot.SCORE_MAX, Slot.ROW_MAX_ABS):
                        table[h, slot] = max(table[h, slot], number)
                    else:
                        table[h, slot] += number
    return table


def tensors(style: str, shape: tuple[int, int, int, int, int, int], seed: int = 0) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(batch, heads, queries, dim), *[(batch, kv_heads, keys, dim)] * 2, (batch, heads, queries, dim)]
    inputs = [torch.randn(*size, generator=generator) for size in sizes]
    if style == "lattice":  # few distinct scores, so that rows tie exactly
        inputs[:2] = [(x * 1.2).round() / 2 for x in inputs[:2]]
    if style == "offset":  # keys share a component, so that scores are large and tie when rounded
        inputs[1] += 6.0
        inputs[0] += 3.0
    if style == "below zero":  # all scores, and so every row's largest
        inputs[0], inputs[1] = inputs[0].abs(), -inputs[1].abs()
    return [x.bfloat16() for x in inputs]


def counted(tensors: list[Tensor], case: dict[str, Any], modes: Tensor | None = None) -> Tensor:
    query, key, value, grad = tensors
    state = new_state(query.shape[1])
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    out = flash_attention(query, key, value, **case, state=state, modes=modes)
    torch.autograd.backward(out, grad)
    return state


def values_of(state: Tensor) -> Floats:
    return np.stack([slot_values(state.numpy(), slot) for slot in Slot], -1)


PLAIN: dict[str, Any] = {"causal": "none", "window": (-1, -1), "softcap": 0.0, "scale": 0.3, "numerics": "kernel"}
CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int, int]]] = {
    "full": (PLAIN, (2, 3, 3, 9, 11, 8)),
    "causal top left": (PLAIN | {"causal": "top_left"}, (2, 2, 2, 12, 9, 8)),
    "causal bottom right with empty rows": (PLAIN | {"causal": "bottom_right"}, (2, 2, 1, 13, 9, 8)),
    "window": (PLAIN | {"causal": "bottom_right", "window": (3, 0)}, (1, 4, 2, 10, 15, 8)),
    "window without causal": (PLAIN | {"window": (2, 1)}, (1, 2, 2, 10, 10, 8)),
    "softcap": (PLAIN | {"softcap": 2.0, "causal": "top_left"}, (1, 4, 2, 11, 11, 8)),
    "no keys": (PLAIN, (2, 2, 2, 3, 0, 8)),
}


@pytest.mark.parametrize("style", ["gaussian", "lattice", "offset", "below zero"])
@pytest.mark.parametrize("numerics", ["kernel", "paper", "float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_every_statistic_matches_a_float64_loop(name: str, numerics: str, style: str) -> None:
    case, shape = CASES[name]
    case = case | {"numerics": numerics}
    inputs = tensors(style, shape)
    compare(values_of(counted(inputs, case)), oracle(inputs, case), exact=numerics == "float64")


def compare(got: Floats, expected: Floats, *, exact: bool) -> None:
    """Compares every slot of a state [H, SLOT_COUNT] with the loop."""
    counts = [Slot.ROWS, Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS, Slot.EMPTY_ROWS, Slot.SKIPPED_ROWS]
    np.testing.assert_array_equal(got[:, counts], expected[:, counts])
    broken = [Slot.NONFINITE_ROWS, Slot.NONFINITE_INPUT_ROWS, Slot.NONFINITE_OUTPUT_ROWS]
    np.testing.assert_array_equal(got[:, broken], expected[:, broken])
    for slot in (Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        np.testing.assert_allclose(got[:, slot], expected[:, slot], rtol=1e-12 if exact else 2e-6, atol=2e-5)
    # In fp32 a score of 50 has an error of 3e-6, which may change a residual by one bf16 step, 2^-8 of its value.
    step = 1e-9 if exact else 2.0**-8
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS):
        np.testing.assert_allclose(got[:, slot], expected[:, slot], atol=step * expected[:, Slot.DELTA_BIAS_ABS].max())
    np.testing.assert_allclose(got[:, Slot.DELTA_BIAS_SUMSQ], expected[:, Slot.DELTA_BIAS_SUMSQ], rtol=step)


def test_cases_include_ties_and_empty_rows() -> None:
    lattice = tensors("lattice", CASES["full"][1])
    offset = tensors("offset", CASES["full"][1])
    assert oracle(lattice, PLAIN)[:, Slot.TIED_ROWS_ONE].sum() > 0
    assert oracle(offset, PLAIN)[:, Slot.TIED_ROWS_BF16].sum() > oracle(offset, PLAIN)[:, Slot.TIED_ROWS_ONE].sum()
    case, shape = CASES["causal bottom right with empty rows"]
    assert oracle(tensors("gaussian", shape), case)[:, Slot.EMPTY_ROWS].sum() > 0


def test_packed_sequences_have_the_statistics_of_separate_calls() -> None:
    lengths = [(5, 7), (0, 3), (4, 4), (3, 2)]
    case = PLAIN | {"causal": "bottom_right", "window": (4, -1)}
    parts = [tensors("lattice", (1, 4, 2, q, k, 8), seed) for seed, (q, k) in enumerate(lengths)]
    packed = [torch.cat(pieces, 2) for pieces in zip(*parts, strict=True)]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(part)], dtype=torch.int32) for part in zip(*lengths, strict=True))
    whole = counted(packed, case | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})
    merged = merge_words([counted(part, case).numpy() for part in parts])
    np.testing.assert_allclose(values_of(whole), values_of(torch.from_numpy(merged)), rtol=1e-6, atol=1e-9)


def test_forward_without_backward_counts_nothing() -> None:
    query, key, value, _ = tensors("gaussian", (1, 2, 2, 6, 6, 8))
    state = new_state(2)
    flash_attention(query, key, value, state=state)
    flash_attention(query.requires_grad_(), key, value, state=state)
    assert torch.equal(state, new_state(2))


@pytest.mark.promise("K3")
def test_empty_rows_are_counted_return_zero_and_are_excluded_from_sums() -> None:
    inputs = tensors("gaussian", (1, 2, 2, 5, 3, 8))
    case = PLAIN | {"causal": "bottom_right"}
    got = values_of(counted(inputs, case))
    assert (got[:, Slot.EMPTY_ROWS] == 2).all()
    assert (got[:, Slot.ROWS] == 3).all()
    assert np.isfinite(got[:, : Slot.OUTPUT_ERROR_MAX]).all()
    out, lse = flash_attention(inputs[0], inputs[1], inputs[2], **case, return_lse=True)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -math.inf).all()
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    grads = torch.autograd.grad(flash_attention(query, key, value, **case), (query, key, value), inputs[3])
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.promise("K2")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 4, 6])
def test_nonfinite_query_is_counted_and_affects_no_other_row(bad: float, row: int) -> None:
    inputs = tensors("gaussian", (1, 2, 2, 7, 7, 8))
    clean = flash_attention(inputs[0], inputs[1], inputs[2], causal=True)
    inputs[0][0, 1, row, 3] = bad
    case = PLAIN | {"causal": "top_left"}
    state = counted(inputs, case)
    got = values_of(state)
    assert got[:, Slot.NONFINITE_ROWS].tolist() == [0, 1]
    assert got[:, Slot.ROWS].tolist() == [7, 6]
    assert np.isfinite(got[:, : Slot.OUTPUT_ERROR_MAX]).all()
    out = flash_attention(inputs[0], inputs[1], inputs[2], causal=True)
    others = [i for i in range(7) if i != row]
    assert torch.equal(out[:, :, others], clean[:, :, others])
    assert torch.equal(out[:, 0], clean[:, 0])
    query = inputs[0].clone().requires_grad_()
    (grad_query,) = torch.autograd.grad(flash_attention(query, inputs[1], inputs[2], causal=True), query, inputs[3])
    assert torch.isfinite(grad_query[:, :, others]).all()


@pytest.mark.promise("K2")
def test_nan_key_affects_only_the_rows_that_see_it() -> None:
    inputs = tensors("gaussian", (1, 2, 2, 7, 7, 8))
    clean = flash_attention(inputs[0], inputs[1], inputs[2], causal=True)
    inputs[1][0, :, 4] = math.nan
    out = flash_attention(inputs[0], inputs[1], inputs[2], causal=True)
    assert torch.equal(out[:, :, :4], clean[:, :, :4])
    assert torch.isnan(out[:, :, 4:]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["row_max", "lse", "delta", "delta_bias"])
def test_row_with_one_nonfinite_value_is_counted_and_excluded_from_sums(name: str, bad: float) -> None:
    values = {each: torch.tensor([[[1.0, 2.0]]]) for each in ("row_max", "lse", "delta", "delta_bias")}
    values[name] = torch.tensor([[[1.0, bad]]])
    all_false, state = torch.zeros(1, 1, 2, dtype=torch.bool), new_state(1)
    accumulate(
        state, Rows(**values, tied_bf16=all_false, tied_one=all_false, shifted=all_false, visible_keys=torch.tensor(4))
    )
    got = values_of(state)[0]
    assert (got[Slot.ROWS], got[Slot.NONFINITE_ROWS]) == (1, 1)
    assert (got[Slot.SCORE_MAX], got[Slot.DELTA_BIAS_SUM]) == (1.0, 1.0)
    assert got[Slot.SCORE_OFFSET_SUM] == pytest.approx(1 - math.log(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_score_at_the_tie_margin_ties_and_a_lower_score_does_not(dtype: torch.dtype) -> None:
    margin = one_margin(dtype)
    below = math.nextafter(-margin, -math.inf)
    scores = torch.tensor([[[[0.0, -margin], [0.0, below]]]], dtype=torch.float64)
    tied = several_within(scores, torch.zeros(1, 1, 2, 1, dtype=torch.float64), margin, torch.empty_like(scores))
    assert tied.flatten().tolist() == [True, False]
