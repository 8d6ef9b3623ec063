"""Modes in the Triton kernels: each changes only its head, stays accurate, and reduces its rounding error."""

import pytest
import torch
from tests.kernels.triton_calls import (
    CUDA,
    DEVICE,
    INTERPRETED,
    Inputs,
    Outputs,
    attend,
    attend_by_reference,
    flags,
    largest_error,
    random_inputs,
    scaled,
    truth,
)
from torch import Tensor

from foreshock.contract.modes import Mode, parse_mode
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import AttentionSpec, new_state
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments, residual_scale
from foreshock.kernels.flash_attention.triton_kernels import forward
from foreshock.kernels.flash_attention.triton_kernels.grad_query import launch_grad_query
from foreshock.kernels.flash_attention.triton_kernels.passes import Tensors
from foreshock.kernels.flash_attention.triton_kernels.rounding import launch_rounding
from foreshock.kernels.flash_attention.triton_kernels.rows import launch_rows
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

# The interpreter also computes masked lanes, and warns when they overflow.
pytestmark = [
    *INTERPRETED,
    # PyTorch's attention makes the first matrix product in autograd's thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]


def test_zero_modes_equal_no_modes() -> None:
    inputs = random_inputs(60, 60)
    without, zeros = attend(inputs, scaled(32)), attend(inputs, scaled(32), flags(Mode.PLAIN, Mode.PLAIN))
    for a, b in zip(without, zeros, strict=True):
        assert torch.equal(a, b)


def test_exact_delta_reduces_the_error_in_the_sum_of_key_gradients() -> None:
    """A constant added to every key does not change the output, so without rounding dK sums to 0 over keys."""
    inputs = random_inputs(64, 64, 64, heads=2, kv_heads=2)
    inputs.value.add_(2.0)
    plain, exact = (attend(inputs, scaled(64), flags(mode, mode)) for mode in (Mode.PLAIN, Mode.EXACT_DELTA))
    sums = [x.grad_key.double().sum(2).norm().item() for x in (plain, exact)]
    assert sums[1] < 0.7 * sums[0]


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_shifted_softmax_changes_only_its_head_and_stays_accurate(causal: str) -> None:
    mode = Mode.PAPER_SOFTMAX
    inputs = random_inputs(64, 64, heads=2)
    inputs.key[:, :, 32:] = inputs.key[:, :, :32]
    spec = scaled(32, causal=causal)
    plain, shifted = (attend(inputs, spec, flags(Mode.PLAIN, m)) for m in (Mode.PLAIN, mode))
    exact, expected = truth(inputs, spec), attend_by_reference(inputs, spec, modes=flags(Mode.PLAIN, mode))
    assert torch.equal(plain.out[:, 0], shifted.out[:, 0])
    assert not torch.equal(plain.out[:, 1], shifted.out[:, 1])
    torch.testing.assert_close(shifted.lse, plain.lse, rtol=1e-5, atol=1e-5)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        error = largest_error(getattr(expected, name), getattr(exact, name))
        assert largest_error(getattr(shifted, name), getattr(exact, name)) <= 2 * error + 1e-5, name
    assert shifted.counts(Slot.SHIFTED_ROWS) == expected.counts(Slot.SHIFTED_ROWS)


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.PAPER_SOFTMAX])
def test_values_of_one_give_outputs_of_one(mode: Mode) -> None:
    inputs = random_inputs(90, 90)
    inputs.value.fill_(1.0)
    out = attend(inputs, scaled(32), flags(mode, mode)).out.float()
    assert (out - 1).abs().max() <= 2**-8
    assert abs((out - 1).mean().item()) < 1e-3


@pytest.mark.promise("K1")
@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.PAPER_SOFTMAX])
@pytest.mark.parametrize(
    ("size", "options"), [(1e4, {}), (1e2, {"causal": "top_left"}), (1e3, {"window_left": 40, "window_right": 0})]
)
def test_rows_with_all_scores_far_below_zero_match_the_same_scores_shifted_up(
    mode: Mode, size: float, options: dict[str, object]
) -> None:
    # A failing head's offset may have either sign; exp2 of minus such a maximum overflows.
    query, key, value, grad = random_inputs(96, 96, 32, 1, 1)
    query[..., 0], key[..., 0] = size**0.5, -(size**0.5)
    spec = AttentionSpec(1.0, **options)  # type: ignore[arg-type]
    low = attend(Inputs(query, key, value, grad), spec, flags(mode))
    key[..., 0] = 0.0
    shifted = attend(Inputs(query, key, value, grad), spec)
    assert low.out.isfinite().all()
    torch.testing.assert_close(low.out.float(), shifted.out.float(), rtol=0.0, atol=0.05)
    for given, wanted in zip(low[-4:-1], shifted[-4:-1], strict=True):
        assert given.isfinite().all()
        torch.testing.assert_close(given.float()[..., 1:], wanted.float()[..., 1:], rtol=0.05, atol=0.1)
    assert low.counts(Slot.NONFINITE_ROWS) == [0.0]


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
def test_saturated_and_tied_rows_are_not_biased(size: float) -> None:
    """Values of one sign: a bias too small to affect the largest error would show in the mean."""
    length = 96
    inputs = random_inputs(length, length)
    query = torch.full_like(inputs.query, size**0.5 / 4)
    key = torch.full_like(inputs.key, -(size**0.5) / 4)
    key[:, :, ::7] = size**0.5 / 4
    positive = Inputs(query, key, inputs.value.abs() + 0.5, inputs.grad)
    spec = scaled(32, scale=1.0)
    given, exact = attend(positive, spec, flags(Mode.PLAIN, Mode.PLAIN)), truth(positive, spec)
    error = (given.out.double() - exact.out) / exact.out
    assert error.abs().max() <= 2.0**-7
    assert (
        abs(
            (given.out.double() + given.residual.double() / residual_scale(given.residual.dtype) - exact.out)
            .div(exact.out)
            .mean()
        )
        < 1e-3
    )


BOTH = "exact_delta+row_corrected"
CASES = [
    pytest.param("row_corrected", 70, 70, 32, 2, 1, {"causal": "top_left"}, 300.0, id="rows, causal, grouped"),
    pytest.param("row_corrected", 33, 75, 40, 2, 2, {"causal": "bottom_right"}, 30.0, id="rows, bottom right"),
    pytest.param("row_corrected", 50, 50, 32, 2, 2, {"softcap": 20.0}, 3.0, id="rows, softcap"),
    pytest.param(
        "row_corrected", 50, 50, 32, 2, 2, {"scale": -0.2, "window_left": 9}, 300.0, id="rows, negative scale"
    ),
    pytest.param("row_corrected", 75, 33, 32, 2, 1, {"causal": "bottom_right"}, 1e4, id="rows, empty rows"),
    pytest.param("row_corrected", 64, 64, 32, 2, 2, {"window_left": 10, "window_right": 0}, 0.0, id="rows, window"),
    pytest.param(BOTH, 70, 70, 24, 4, 2, {"causal": "top_left"}, 3000.0, id="both, causal, grouped"),
]
if CUDA:
    CASES += [
        pytest.param(mode, length, length, dim, 8, kv, options, offset, id=f"{mode}, {dim}, {length}, {kv}, {options}")
        for mode in ("row_corrected", BOTH)
        for length, dim, kv, options, offset in (
            (1024, 64, 8, {"causal": "top_left"}, 300.0),
            (1000, 128, 1, {"causal": "top_left"}, 3000.0),
            (777, 256, 4, {}, 30.0),
            (900, 96, 2, {"window_left": 100, "window_right": 50}, 1e4),
        )
    ]


def with_shared_directions(inputs: Inputs, offset: float) -> Inputs:
    """The same with queries and keys that share a direction, for an offset of about `offset`; values share another."""
    generator = torch.Generator().manual_seed(11)
    dim = inputs.key.shape[3]
    direction = torch.randn(dim, generator=generator).to(DEVICE)
    direction /= direction.norm()
    shared = 3 * torch.randn(dim, generator=generator).to(DEVICE)
    return Inputs(
        (inputs.query + 4 * direction).to(inputs.query.dtype),
        (inputs.key + direction * offset * dim**0.5 / 4).to(inputs.key.dtype),
        (inputs.value + shared).to(inputs.value.dtype),
        inputs.grad,
    )


def others_are_unchanged(mitigated: Outputs, plain: Outputs, head: int) -> bool:
    """Whether the outputs and statistics of all other heads are bitwise unchanged."""
    others = [each for each in range(plain.out.shape[1]) if each != head]
    unchanged = all(torch.equal(a[:, others], b[:, others]) for a, b in zip(mitigated[:5], plain[:5], strict=True))
    return unchanged and torch.equal(mitigated.state[others], plain.state[others])


def score_rounding(inputs: Inputs, spec: AttentionSpec) -> Tensor:
    """Largest error of fp32 products of D terms in any summation order, [B, H, Sq]: D 2^-24 of the sum of their
    magnitudes, for the key with the largest."""
    query, key = inputs.query.double().abs(), inputs.key.double().abs()
    sizes = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
    return query.shape[3] * 2.0**-24 * abs(spec.scale) * sizes.amax(3) + 1e-5


@pytest.mark.promise("K1")
@pytest.mark.parametrize(("name", "length_q", "length_k", "dim", "heads", "kv_heads", "options", "offset"), CASES)
def test_mitigated_head_is_accurate_and_the_others_are_bitwise_unchanged(
    name: str, length_q: int, length_k: int, dim: int, heads: int, kv_heads: int, options: dict[str, object],
    offset: float,
) -> None:  # fmt: skip
    inputs, spec = (
        with_shared_directions(random_inputs(length_q, length_k, dim, heads, kv_heads), offset),
        scaled(dim, **options),
    )
    mode = parse_mode(name)
    modes = flags(mode, *[Mode.PLAIN] * (heads - 1))
    given, expected = attend(inputs, spec, modes), attend_by_reference(inputs, spec, modes=modes)
    exact, plain = truth(inputs, spec), attend(inputs, spec, flags(*[Mode.PLAIN] * heads))
    for field in ("out", "grad_query", "grad_key", "grad_value"):
        error = largest_error(getattr(expected, field), getattr(exact, field))
        assert largest_error(getattr(given, field), getattr(exact, field)) <= 2 * error + 1e-5, field
    assert (given.lse.isfinite() == exact.lse.isfinite()).all()
    assert ((given.lse - exact.lse).abs().nan_to_num(0) <= score_rounding(inputs, spec)).all()
    assert others_are_unchanged(given, plain, 0)
    for slot in (Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS):
        assert given.counts(slot) == expected.counts(slot)
    for slot in (Slot.SCORE_MAX, Slot.SCORE_OFFSET_SUM):
        assert given.counts(slot) == pytest.approx(expected.counts(slot), rel=1e-4, abs=0.05 * length_q)
    if name == "row_corrected":
        assert all(torch.equal(a, b) for a, b in zip(given[:5], plain[:5], strict=True))
        assert torch.equal(given.grad_value, plain.grad_value)
        assert torch.equal(given.state, plain.state)


def test_row_correction_is_100_times_as_accurate_at_an_offset_of_300() -> None:
    inputs, spec = with_shared_directions(random_inputs(96, 96, 32, 1, 1), 300.0), scaled(32, causal="top_left")
    exact = truth(inputs, spec).grad_query
    plain, mitigated = (
        (attend(inputs, spec, flags(mode)).grad_query.double() - exact).norm().item()
        for mode in (Mode.PLAIN, Mode.ROW_CORRECTED)
    )
    assert 100 * mitigated <= plain
    assert mitigated <= 0.006 * exact.norm().item()


def test_pass_for_corrected_heads_writes_only_their_dq_and_delta() -> None:
    modes = flags(Mode.PLAIN, Mode.ROW_CORRECTED, Mode.EXACT_DELTA, Mode.EXACT_DELTA | Mode.ROW_CORRECTED)
    inputs, spec = with_shared_directions(random_inputs(70, 70, 32, 4, 2), 300.0), scaled(32, causal="top_left")
    query, key, value, grad = inputs
    given = Arguments(modes, None, None, 70, 70, None, spec)
    saved = (query, key, value, *forward.attention_forward(query, key, value, given))
    tensors = Tensors(grad, *saved, new_state(4, DEVICE), modes, None, None, None)
    call = call_of(query, key, value, given, grad, *saved[3:])
    config = configs(call.capability, call.block_d, call.mean_keys).grad_query

    untouched = torch.full_like(query, 7.0)

    def after_passes(*passes: bool) -> list[Tensor]:
        """dQ, delta and folded rows [B, H, Sq, ...] after the row pass and `passes` (`corrected_only` of each)."""
        rows, grad_query = launch_rows(call, tensors), untouched.clone()
        for corrected_only in passes:
            launch_grad_query(call, config, tensors, rows, grad_query, corrected_only=corrected_only)
        assert isinstance(rows.delta, Tensor)
        assert isinstance(rows.folded, Tensor)
        return [grad_query, rows.delta, rows.folded.view(*query.shape[:3], 8)]

    for before, all_heads, corrected_heads in zip(after_passes(), after_passes(False), after_passes(True), strict=True):
        for head, corrected in enumerate((False, True, False, True)):
            assert torch.equal(corrected_heads[:, head], (all_heads if corrected else before)[:, head])
            assert torch.equal(corrected_heads[:, head], before[:, head]) != corrected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("rows_of_heads", [False, True])
def test_rounding_pass_writes_dq_of_uncorrected_heads_from_the_hopper_sums(
    heads: int, rows_of_heads: bool, dtype: torch.dtype
) -> None:
    sums = torch.randn(2, heads, 13, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    if rows_of_heads:
        sums = sums.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = (sums * 0.3).to(dtype)
    spec, modes = scaled(128, scale=0.3), flags(*[Mode.PLAIN, Mode.ROW_CORRECTED] * 2)[:heads].clone()
    for given in (None, torch.zeros_like(modes), modes):
        grad_query = torch.full_like(wanted, 7.0)
        call = call_of(wanted, wanted, wanted, Arguments(given, None, None, 13, 13, None, spec))
        launch_rounding(call, "dQ", sums, grad_query, 0.3, given)
        for head in range(heads):
            corrected = given is modes and bool(modes[head])
            assert torch.equal(grad_query[:, head], (torch.full_like(wanted, 7.0) if corrected else wanted)[:, head])
