"""Log-sum-exp gradients in the Triton kernels, against float64: in every mode, packed and with empty rows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.kernels.triton_calls import (
    CUDA,
    DEVICE,
    INTERPRETED,
    Inputs,
    attend,
    attend_by_reference,
    largest_error,
    random_inputs,
    scaled,
    truth,
)

from foreshock.contract.modes import parse_mode
from foreshock.kernels.flash_attention import AttentionSpec

pytestmark = INTERPRETED

CASES = [
    pytest.param("plain", 70, 70, 32, 2, 1, {"causal": "top_left"}, id="plain, causal, grouped"),
    pytest.param("plain", 75, 33, 24, 2, 2, {"causal": "bottom_right"}, id="plain, empty rows"),
    pytest.param("row_corrected", 50, 50, 32, 2, 2, {"softcap": 20.0}, id="rows, softcap"),
    pytest.param("row_corrected", 33, 75, 40, 2, 1, {"causal": "bottom_right"}, id="rows, bottom right"),
    pytest.param("row_corrected", 75, 33, 32, 2, 2, {"causal": "bottom_right"}, id="rows, empty rows"),
    pytest.param(
        "exact_delta+row_corrected", 64, 64, 32, 2, 2, {"window_left": 10, "window_right": 0}, id="both, window"
    ),
]
if CUDA:
    CASES += [
        pytest.param(mode, length, length, dim, 8, kv, options, id=f"{mode}, {dim}, {length}, {kv}, {options}")
        for mode in ("plain", "exact_delta", "row_corrected")
        for length, dim, kv, options in (
            (1024, 64, 8, {"causal": "top_left"}),
            (1000, 128, 1, {"causal": "top_left"}),
            (900, 96, 2, {"window_left": 100, "window_right": 50}),
        )
    ]


@contextmanager
def deterministic() -> Iterator[None]:
    """Enables PyTorch's deterministic mode. PyTorch then rejects cuBLAS products, which the kernels do not need."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def with_shared_key_direction(inputs: Inputs) -> Inputs:
    """The same with keys that share a direction, which row correction removes."""
    return inputs._replace(key=inputs.key + 3 * inputs.key[:, :, :1])


@pytest.mark.parametrize(("mode", "length_q", "length_k", "dim", "heads", "kv_heads", "options"), CASES)
def test_gradients_with_a_log_sum_exp_gradient_are_as_accurate_as_without(
    mode: str, length_q: int, length_k: int, dim: int, heads: int, kv_heads: int, options: dict[str, object]
) -> None:
    inputs = with_shared_key_direction(random_inputs(length_q, length_k, dim, heads, kv_heads, seed=21))
    spec = scaled(dim, **options)
    flags = [int(parse_mode(mode)) if head % 2 == 0 else 0 for head in range(heads)]
    modes = torch.tensor(flags, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(4)
    grad_lse = torch.randn(inputs.query.shape[:3], generator=generator).to(DEVICE)
    result = first = again = attend(inputs, spec, modes, grad_lse=grad_lse)
    if CUDA:
        with deterministic():  # otherwise, Hopper sums dQ in any order at head dim 128
            first, again = (attend(inputs, spec, modes, grad_lse=grad_lse) for _ in range(2))  # new, then cached
    without = attend(inputs, spec, modes)
    exact = truth(inputs, spec, grad_lse=grad_lse.double())
    exact_without = truth(inputs, spec)
    for name in ("grad_query", "grad_key", "grad_value"):
        got, exact_gradient = getattr(result, name), getattr(exact, name)
        assert torch.equal(getattr(first, name), getattr(again, name))
        # One more bf16 term of the same size: the error without it, and half a rounding step of the result.
        allowed = (
            2 * largest_error(getattr(without, name), getattr(exact_without, name)) + 2**-8 * exact_gradient.abs().max()
        )
        assert largest_error(got, exact_gradient) <= allowed, name
    # Only in dQ is the part of the log-sum-exp large: without it, the gradient would clearly differ.
    assert (exact.grad_query - exact_without.grad_query).norm() > 0.1 * exact.grad_query.norm()
    assert torch.equal(result.state, without.state)


def test_zero_log_sum_exp_gradient_and_that_of_empty_rows_have_no_effect() -> None:
    inputs, spec = random_inputs(61, 40, 32, 2, 1, seed=3), scaled(32, causal="bottom_right")
    grad_lse = torch.zeros(inputs.query.shape[:3], device=DEVICE)
    grad_lse[:, :, :21] = float("nan")  # 61 - 40 rows see no key
    result, without = attend(inputs, spec, grad_lse=grad_lse), attend(inputs, spec)
    for got, other in zip(result, without, strict=True):
        assert torch.equal(got, other)


def test_packed_sequences_use_the_log_sum_exp_gradient_of_each_row() -> None:
    lengths = [17, 1, 30, 9]
    total = sum(lengths)
    inputs = random_inputs(total, total, 32, 2, 2, seed=9)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    spec: AttentionSpec = scaled(32, causal="top_left")
    grad_lse = torch.randn(inputs.query.shape[:3], generator=torch.Generator().manual_seed(6)).to(DEVICE)
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "longest": (max(lengths), max(lengths))}
    result = attend(inputs, spec, grad_lse=grad_lse, **packed)  # type: ignore[arg-type]
    reference_result = attend_by_reference(inputs, spec, grad_lse=grad_lse, **packed)
    for name in ("grad_query", "grad_key", "grad_value"):
        got, other = getattr(result, name), getattr(reference_result, name)
        assert largest_error(got, other) <= 2**-6 * other.abs().max()
