"""The Triton kernels, compared with float64 and the reference: outputs, gradients, statistics and features."""

import math
from dataclasses import replace

import pytest
import torch
from tests.kernels.triton_calls import (
    CUDA,
    DEVICE,
    INTERPRETED,
    Inputs,
    attend,
    attend_by_reference,
    flags,
    largest_error,
    pytorch_own,
    random_inputs,
    scaled,
    truth,
)

from foreshock.contract.modes import Mode
from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SUM_SLOTS, Slot
from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.kernels.flash_attention.spec import residual_scale

# The interpreter also computes masked lanes, and warns when they overflow.
pytestmark = [
    *INTERPRETED,
    # PyTorch's attention makes the first matrix product in autograd's thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

CASES = [
    pytest.param(64, 64, 32, 2, 2, {}, id="full"),
    pytest.param(70, 70, 64, 2, 1, {"causal": "top_left"}, id="causal, two heads per key head"),
    pytest.param(33, 75, 40, 2, 2, {"causal": "bottom_right"}, id="fewer queries, bottom right"),
    pytest.param(75, 33, 32, 1, 1, {"causal": "bottom_right"}, id="empty rows"),
    pytest.param(40, 60, 32, 1, 1, {"causal": "top_left"}, id="fewer queries, top left"),
    pytest.param(100, 100, 32, 1, 1, {"causal": "top_left", "window_left": 10}, id="sliding window"),
    pytest.param(90, 80, 32, 1, 1, {"window_left": 5, "window_right": 7}, id="window on both sides"),
    pytest.param(50, 50, 32, 1, 1, {"softcap": 2.0, "causal": "top_left"}, id="softcap"),
    pytest.param(50, 50, 32, 1, 1, {"scale": -0.3}, id="negative scale"),
]
if CUDA:
    CASES += [
        pytest.param(1024, 1024, 64, 4, 4, {"causal": "top_left"}, id="1024, dim 64"),
        pytest.param(1000, 1000, 128, 8, 1, {"causal": "top_left"}, id="1000, dim 128, eight heads per key head"),
        pytest.param(1024, 1024, 128, 4, 4, {}, id="1024, dim 128"),
        pytest.param(5000, 5000, 64, 2, 1, {"causal": "top_left"}, id="5000, dim 64"),
        pytest.param(1024, 1024, 256, 2, 2, {"causal": "top_left"}, id="dim 256"),
        pytest.param(1024, 1024, 192, 2, 2, {"causal": "top_left"}, id="dim 192"),
        pytest.param(777, 999, 80, 2, 2, {"causal": "bottom_right"}, id="dim 80"),
        pytest.param(777, 999, 96, 2, 2, {"window_left": 100, "window_right": 50}, id="dim 96, window"),
        pytest.param(1024, 1024, 32, 2, 2, {"causal": "top_left"}, id="1024, dim 32"),
        pytest.param(900, 900, 128, 2, 2, {"causal": "top_left", "softcap": 30.0}, id="dim 128, softcap"),
    ]


TYPED_CASES = [
    pytest.param(*case.values, dtype, id=f"{case.id}, {name}")
    for name, dtype, cases in (
        ("bf16", torch.bfloat16, CASES),
        ("fp16", torch.float16, CASES if CUDA else CASES[:3]),
    )
    for case in cases
]


@pytest.mark.promise("K1")
@pytest.mark.parametrize(("length_q", "length_k", "dim", "heads", "kv_heads", "options", "dtype"), TYPED_CASES)
def test_errors_of_output_and_gradients_are_at_most_twice_those_of_pytorch(
    length_q: int, length_k: int, dim: int, heads: int, kv_heads: int, options: dict[str, object], dtype: torch.dtype
) -> None:
    inputs = random_inputs(length_q, length_k, dim, heads, kv_heads, batch=2 if CUDA else 1, dtype=dtype)
    spec = scaled(dim, **options)
    given, exact = attend(inputs, spec), truth(inputs, spec)
    pytorch = pytorch_own(inputs, spec)
    names = ("out", "grad_query", "grad_key", "grad_value")
    for name, pytorch_value in zip(names, pytorch, strict=True):
        error = largest_error(getattr(given, name), getattr(exact, name))
        allowed = 2 * largest_error(pytorch_value, getattr(exact, name)) + 1e-5
        assert error <= allowed, f"the error of {name} is {error:.2e}, more than the allowed {allowed:.2e}"
    seen = exact.row_max.isfinite()
    assert torch.equal(given.lse.isfinite(), seen)
    torch.testing.assert_close(given.lse[seen], exact.lse[seen].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given.row_max[seen], exact.row_max[seen].float(), rtol=1e-5, atol=1e-5)
    # O and its saved residual have only the error of rounding P.
    restored = given.out.double() + given.residual.double() / residual_scale(given.residual.dtype)
    assert (restored - exact.out).norm() < 0.8 * (given.out.double() - exact.out).norm()


@pytest.mark.parametrize(("length_q", "length_k", "dim", "heads", "kv_heads", "options"), CASES)
def test_statistics_match_the_reference(
    length_q: int, length_k: int, dim: int, heads: int, kv_heads: int, options: dict[str, object]
) -> None:
    """Scores on a coarse grid are exact in fp32 in any order of summation, so counts must be equal."""
    inputs = random_inputs(length_q, length_k, dim, heads, kv_heads, batch=2 if CUDA else 1)
    query, key = (x.mul(2).round().div(2) for x in inputs[:2])
    grid = inputs._replace(query=query, key=key)
    spec = scaled(dim, **({"scale": 0.25} | options))
    given, expected = attend(grid, spec), attend_by_reference(grid, spec)
    if spec.softcap == 0 and math.log2(abs(spec.scale)).is_integer():
        for slot in COUNT_SLOTS:
            assert given.counts(slot) == expected.counts(slot), slot.name
        assert sum(given.counts(Slot.TIED_ROWS_ONE)) > 0 or length_k < 40
    for slot in (*MAX_SLOTS, *SUM_SLOTS):
        rel, absolute = (2e-2, 0.5) if "BIAS" in slot.name else (1e-5, 1e-3)
        assert given.counts(slot) == pytest.approx(expected.counts(slot), rel=rel, abs=absolute), slot.name


@pytest.mark.parametrize("size", [0.0, 1.0, 40.0, 3000.0], ids=lambda size: f"scores near {size}")
@pytest.mark.parametrize("length", [40, 96, 700] if CUDA else [70])
def test_ties_are_counted_at_any_score_size_and_across_tiles(size: float, length: int) -> None:
    """Rows tie at one, in bf16, in both or in neither, at any positions of their keys."""
    inputs = random_inputs(length, length, 32, heads=3, kv_heads=3)
    query = torch.zeros_like(inputs.query)
    query[..., 0] = 1.0
    key = torch.zeros_like(inputs.key)
    key[..., 0] = -8.0
    for head, (low, high) in enumerate([(0, 0), (0, 1), (3, length - 1)]):
        key[:, head, [low, high], 0] = 1.0
    # A third key, close enough to tie only in bf16 if scores are large.
    key[:, :, length // 2, 0] = 1.0 - 2.0**-8
    grid = Inputs(query, key, *inputs[2:])
    spec = scaled(32, scale=size if size else 1.0) if size != 0 else scaled(32, scale=0.0)
    given, expected = attend(grid, spec), attend_by_reference(grid, spec)
    for slot in COUNT_SLOTS:
        assert given.counts(slot) == expected.counts(slot), slot.name


@pytest.mark.parametrize("modes", [None, (Mode.PLAIN, Mode.ROW_CORRECTED)], ids=["plain", "corrected"])
def test_packed_sequences_match_separate_calls_and_rows_past_them_are_zero(
    modes: tuple[Mode, ...] | None,
) -> None:
    lengths_q, lengths_k, total = [5, 40, 1], [9, 33, 3], 60
    inputs = random_inputs(total, total, 32, heads=2, kv_heads=1)
    inputs.key.add_(3 * inputs.key[:, :, :1])  # a direction that all keys share, which row correction removes
    spec, head_modes = scaled(32, causal="bottom_right"), None if modes is None else flags(*modes)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        for lengths in (lengths_q, lengths_k)
    )
    packed = attend(inputs, spec, head_modes, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, longest=(40, 40))
    for index in range(len(lengths_q)):
        q, k = (slice(int(cu[index]), int(cu[index + 1])) for cu in (cu_q, cu_k))
        one = Inputs(inputs.query[:, :, q], inputs.key[:, :, k], inputs.value[:, :, k], inputs.grad[:, :, q])
        separate = attend(one, spec, head_modes)
        for name, rows in (("out", q), ("lse", q), ("grad_query", q), ("grad_key", k), ("grad_value", k)):
            assert torch.equal(getattr(packed, name)[:, :, rows], getattr(separate, name)), name
    assert packed.out[:, :, int(cu_q[-1]) :].abs().sum() == 0
    assert packed.grad_query[:, :, int(cu_q[-1]) :].abs().sum() == 0
    assert packed.grad_key[:, :, int(cu_k[-1]) :].abs().sum() == 0
    expected = attend_by_reference(inputs, spec, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, longest=(40, 40))
    for slot in (Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS):
        assert packed.counts(slot) == expected.counts(slot)


@pytest.mark.parametrize(
    ("causal", "modes"), [("none", None), ("top_left", None), ("none", (Mode.ROW_CORRECTED, Mode.PLAIN))]
)
def test_dropout_drops_the_same_entries_as_the_reference(causal: str, modes: tuple[Mode, ...] | None) -> None:
    inputs = random_inputs(34, 34, 32, heads=2, kv_heads=1, batch=2)
    spec, head_modes = scaled(32, causal=causal, dropout_p=0.3), None if modes is None else flags(*modes)
    seed = torch.tensor(0x123456789ABCDEF, device=DEVICE)
    given = attend(inputs, spec, head_modes, seed=seed)
    expected, exact = attend_by_reference(inputs, spec, modes=head_modes, seed=seed), truth(inputs, spec, seed=seed)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        error = largest_error(getattr(expected, name), getattr(exact, name))
        assert largest_error(getattr(given, name), getattr(exact, name)) <= 2 * error + 1e-5, name
    assert not torch.allclose(exact.out, truth(inputs, replace(spec, dropout_p=0.0)).out)


@pytest.mark.promise("K2")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nonfinite_query_is_counted_as_one_row_and_affects_no_other(poison: float) -> None:
    inputs = random_inputs(70, 70, heads=2)
    spec = scaled(32, causal="top_left")
    clean = attend(inputs, spec)
    inputs.query[0, 1, 37, 3] = poison
    poisoned = attend(inputs, spec)
    rows = [i for i in range(70) if i != 37]
    assert torch.equal(clean.out[:, :, rows], poisoned.out[:, :, rows])
    assert torch.equal(clean.grad_query[:, :, rows], poisoned.grad_query[:, :, rows])
    assert torch.equal(clean.grad_key[:, 0], poisoned.grad_key[:, 0])
    assert poisoned.counts(Slot.NONFINITE_ROWS) == [0, 1]
    assert poisoned.counts(Slot.ROWS) == [70, 69]
    for slot in {*MAX_SLOTS, *SUM_SLOTS} - {
        Slot.OUTPUT_ERROR_MAX,
        Slot.GRADIENT_ERROR_MAX,
    }:  # measured only for native attention
        assert all(map(math.isfinite, poisoned.counts(slot))), slot.name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("broken", ["query", "key", "value", "grad"])
def test_nonfinite_inputs_and_gradients_are_counted_separately(broken: str, packed: bool) -> None:
    inputs = random_inputs(70, 70, heads=2)
    getattr(inputs, broken)[0, 1, 37, 3] = math.nan
    cu = torch.tensor([0, 10, 70], dtype=torch.int32, device=DEVICE) if packed else None
    for run in (attend, attend_by_reference):
        counted = run(inputs, scaled(32, causal="top_left"), cu_seqlens_q=cu, cu_seqlens_k=cu)
        healthy, poisoned = counted.counts(Slot.NONFINITE_ROWS)
        assert healthy == 0
        assert 1 <= poisoned <= 70 - 32 + 32 * (broken == "value")  # a nonfinite value affects all rows of its tile
        assert counted.counts(Slot.NONFINITE_INPUT_ROWS) == [0, 0 if broken == "grad" else poisoned]
        assert counted.counts(Slot.NONFINITE_OUTPUT_ROWS) == [0, 0]


@pytest.mark.promise("K3")
def test_rows_without_keys_are_zero_counted_and_have_no_gradient() -> None:
    inputs = random_inputs(40, 8)
    given = attend(inputs, scaled(32, causal="bottom_right"))
    assert given.out[:, :, :32].abs().sum() == 0
    assert given.grad_query[:, :, :32].abs().sum() == 0
    assert (given.lse[:, :, :32] == -math.inf).all()
    assert (given.row_max[:, :, :32] == -math.inf).all()
    assert given.counts(Slot.EMPTY_ROWS) == [32, 32]
    assert given.counts(Slot.ROWS) == [8, 8]
    assert all(x.isfinite().all() for x in (given.grad_key, given.grad_value))


@pytest.mark.promise("K4")
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize(("length_q", "length_k"), [(0, 0), (0, 2), (1, 0), (1, 1), (2, 1), (1, 2)])
def test_lengths_of_zero_and_one_work(batch: int, length_q: int, length_k: int) -> None:
    inputs = random_inputs(length_q, length_k, batch=batch)
    given, expected = attend(inputs, scaled(32)), attend_by_reference(inputs, scaled(32))
    torch.testing.assert_close(given.out, expected.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(given.grad_key, expected.grad_key, rtol=1e-2, atol=1e-2)
    for slot in COUNT_SLOTS:
        assert given.counts(slot) == expected.counts(slot)


LENGTHS = [*range(1, 131), 239, 799, 1023, 1024, 1025] if CUDA else [1, 2, 31, 32, 33, 65]


@pytest.mark.promise("K5")
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_is_accurate(length: int) -> None:
    inputs = random_inputs(length, length, heads=1, kv_heads=1)
    spec = scaled(32, causal="top_left")
    given, exact = attend(inputs, spec), truth(inputs, spec)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        torch.testing.assert_close(getattr(given, name).double(), getattr(exact, name), rtol=2e-2, atol=3e-2)
    assert given.counts(Slot.ROWS) == [length]


@pytest.mark.promise("K1")
@pytest.mark.parametrize("dim", range(8, 257, 8) if CUDA else (8, 24))
def test_every_multiple_of_eight_works_as_head_dim(dim: int) -> None:
    inputs = random_inputs(70, 70, dim, 1, 1, dtype=torch.float16 if dim % 16 else torch.bfloat16)
    spec = scaled(dim, causal="top_left")
    given, exact, pytorch = attend(inputs, spec), truth(inputs, spec), pytorch_own(inputs, spec)
    for name, pytorch_value in zip(("out", "grad_query", "grad_key", "grad_value"), pytorch, strict=True):
        error, allowed = (largest_error(x, getattr(exact, name)) for x in (getattr(given, name), pytorch_value))
        assert error <= 2 * allowed + 1e-5, name


@pytest.mark.promise("K6")
@pytest.mark.parametrize("layout", ["transposed", "sliced", "padded", "unaligned", "expanded"])
def test_strides_are_respected(layout: str) -> None:
    plain = random_inputs(48, 48, 32, heads=2, kv_heads=2)

    def in_layout(x: torch.Tensor) -> torch.Tensor:
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            return torch.cat([x, x], 3)[..., :32]
        if layout == "padded":
            return torch.nn.functional.pad(x, (0, 3))[..., :32]
        if layout == "unaligned":
            flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)
            return flat[1:].copy_(x.flatten()).view(x.shape)
        return x[:, :1, :1].expand(x.shape)

    given = Inputs(*map(in_layout, plain))
    strided, packed = attend(given, scaled(32)), attend(Inputs(*(x.contiguous() for x in given)), scaled(32))
    for a, b in zip(strided[:-1], packed[:-1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert strided.counts(Slot.ROWS) == packed.counts(Slot.ROWS)


@pytest.mark.promise("K6")
def test_rows_with_noncontiguous_elements_are_rejected() -> None:
    inputs = random_inputs(16, 16, 32)
    scattered = inputs.query.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"query has stride 16 in its last dimension.*contiguous"):
        attend(inputs._replace(query=scattered), scaled(32))


def test_unsupported_head_dim_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"head dim 20 is not supported.*multiple of 8"):
        attend(random_inputs(16, 16, 20), scaled(20))


@pytest.mark.promise("K8")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 30.0, 90.0])
def test_extreme_scores_stay_finite_and_lse_stays_within_its_bounds(size: float, dtype: torch.dtype) -> None:
    inputs = random_inputs(48, 48, dtype=dtype)
    large = inputs._replace(query=(inputs.query * size), key=(inputs.key * size))
    spec = scaled(32, scale=1.0)
    given = attend(large, spec)
    assert all(x.isfinite().all() for x in given[:-1])
    assert (given.row_max <= given.lse + 1e-6 * given.lse.abs()).all()
    assert (given.lse <= given.row_max + math.log(48) + 1e-5 + 1e-6 * given.row_max.abs()).all()
    assert given.counts(Slot.ROWS) == [48, 48]


@pytest.mark.promise("K9")
def test_inputs_and_random_state_are_unchanged() -> None:
    inputs = random_inputs(45, 70, 40, heads=2, kv_heads=1)
    before, state = [x.clone() for x in inputs], torch.get_rng_state()
    attend(inputs, AttentionSpec(scale=0.2, causal="bottom_right"))
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.promise("K9")
def test_repeats_are_bitwise_equal() -> None:
    length, repeats = (2000, 1000) if CUDA else (40, 2)
    inputs = random_inputs(length, length, 64, heads=2, kv_heads=1)
    spec = scaled(64, causal="top_left")
    modes = flags(Mode.EXACT_DELTA, Mode.PAPER_SOFTMAX)
    first = attend(inputs, spec, modes)
    for _ in range(repeats):
        assert all(torch.equal(a, b) for a, b in zip(first, attend(inputs, spec, modes), strict=True))
