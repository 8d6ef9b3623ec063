"""The modes of a head in the Triton kernels: each acts on its head alone and computes the same mathematics."""

import pytest
import torch
from tests.kernels.triton_calls import (
    INTERPRETED,
    Inputs,
    attend,
    attend_by_reference,
    flags,
    largest_error,
    random_inputs,
    scaled,
    truth,
)

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.kernels.flash_attention.spec import residual_scale

# The interpreter computes masked lanes too, and warns of what they overflow to.
pytestmark = [
    *INTERPRETED,
    # PyTorch's own attention is the first to multiply in autograd's thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]


def test_modes_of_zero_are_the_same_as_no_modes() -> None:
    inputs = random_inputs(60, 60)
    without, zeros = attend(inputs, scaled(32)), attend(inputs, scaled(32), flags(Mode.PLAIN, Mode.PLAIN))
    for a, b in zip(without, zeros, strict=True):
        assert torch.equal(a, b)


def test_exact_delta_takes_the_defect_out_of_the_key_gradients_sum() -> None:
    """A constant added to every key changes no output, so dK sums to 0 over keys but for rounding."""
    inputs = random_inputs(64, 64, 64, heads=2, kv_heads=2)
    inputs.value.add_(2.0)
    plain, exact = (attend(inputs, scaled(64), flags(mode, mode)) for mode in (Mode.PLAIN, Mode.EXACT_DELTA))
    sums = [x.grad_key.double().sum(2).norm().item() for x in (plain, exact)]
    assert sums[1] < 0.7 * sums[0]


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_a_shifted_softmax_computes_the_same_mathematics_on_its_head_alone(causal: str) -> None:
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
def test_values_of_one_give_an_output_of_one(mode: Mode) -> None:
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
def test_rows_whose_scores_are_all_far_below_zero_are_those_of_the_same_scores_shifted_up(
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
    """Values of one sign: a bias that a largest error cannot see would show in the mean."""
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
