"""The gradient of the log-sum-exp in the Triton kernels: against float64, in every mode, packed and with empty rows."""

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
    """Equal bits are asked of PyTorch. It refuses cuBLAS's products meanwhile, which the kernels do not need."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def shared(inputs: Inputs) -> Inputs:
    """The same with keys that share a direction, which corrected rows do not see."""
    return inputs._replace(key=inputs.key + 3 * inputs.key[:, :, :1])


@pytest.mark.parametrize(("mode", "length_q", "length_k", "dim", "heads", "kv_heads", "options"), CASES)
def test_the_kernels_gradients_through_the_log_sum_exp_are_as_exact_as_without_it(
    mode: str, length_q: int, length_k: int, dim: int, heads: int, kv_heads: int, options: dict[str, object]
) -> None:
    inputs = shared(random_inputs(length_q, length_k, dim, heads, kv_heads, seed=21))
    spec = scaled(dim, **options)
    flags = [int(parse_mode(mode)) if head % 2 == 0 else 0 for head in range(heads)]
    modes = torch.tensor(flags, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(4)
    grad_lse = torch.randn(inputs.query.shape[:3], generator=generator).to(DEVICE)
    ours = first = again = attend(inputs, spec, modes, grad_lse=grad_lse)
    if CUDA:
        with deterministic():  # without which dQ is added in any order on Hopper at head dim 128
            first, again = (attend(inputs, spec, modes, grad_lse=grad_lse) for _ in range(2))  # new, then remembered
    without = attend(inputs, spec, modes)
    exact = truth(inputs, spec, grad_lse=grad_lse.double())
    exact_without = truth(inputs, spec)
    for name in ("grad_query", "grad_key", "grad_value"):
        mine, true = getattr(ours, name), getattr(exact, name)
        assert torch.equal(getattr(first, name), getattr(again, name))
        # bf16 of one more term of the same size: the error without it, and half a step of the result.
        allowed = 2 * largest_error(getattr(without, name), getattr(exact_without, name)) + 2**-8 * true.abs().max()
        assert largest_error(mine, true) <= allowed, name
    # Of dQ alone the log-sum-exp's own share is large: without it these would be another gradient.
    assert (exact.grad_query - exact_without.grad_query).norm() > 0.1 * exact.grad_query.norm()
    assert torch.equal(ours.state, without.state)


def test_a_zero_gradient_of_the_log_sum_exp_changes_no_bit_and_one_where_no_key_is_seen_nothing() -> None:
    inputs, spec = random_inputs(61, 40, 32, 2, 1, seed=3), scaled(32, causal="bottom_right")
    grad_lse = torch.zeros(inputs.query.shape[:3], device=DEVICE)
    grad_lse[:, :, :21] = float("nan")  # 61 - 40 rows see no key
    ours, without = attend(inputs, spec, grad_lse=grad_lse), attend(inputs, spec)
    for mine, other in zip(ours, without, strict=True):
        assert torch.equal(mine, other)


def test_packed_sequences_take_each_row_its_own_gradient_of_the_log_sum_exp() -> None:
    lengths = [17, 1, 30, 9]
    total = sum(lengths)
    inputs = random_inputs(total, total, 32, 2, 2, seed=9)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    spec: AttentionSpec = scaled(32, causal="top_left")
    grad_lse = torch.randn(inputs.query.shape[:3], generator=torch.Generator().manual_seed(6)).to(DEVICE)
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "longest": (max(lengths), max(lengths))}
    ours = attend(inputs, spec, grad_lse=grad_lse, **packed)  # type: ignore[arg-type]
    theirs = attend_by_reference(inputs, spec, grad_lse=grad_lse, **packed)
    for name in ("grad_query", "grad_key", "grad_value"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert largest_error(mine, other) <= 2**-6 * other.abs().max()
