"""Modes in the reference: which heads and rows they change, and that the results stay accurate."""

import math

import numpy as np
import pytest
import torch
from tests.kernels.row_error import row_sum_defect
from torch import Tensor

from foreshock.contract.modes import Mode, all_modes, mode_name
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, Numerics, flash_attention, new_state
from foreshock.kernels.flash_attention.shift import paper_shift
from foreshock.kernels.flash_attention.statistics import one_margin


def tied(batch: int = 2, heads: int = 4, length: int = 24, dim: int = 16, seed: int = 0) -> list[Tensor]:
    """query, key, value and gradient; every key occurs twice, so that every row ties."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, grad = (torch.randn(batch, heads, length, dim, generator=generator) for _ in range(4))
    key[:, :, length // 2 :] = key[:, :, : length // 2]
    return [x.bfloat16() for x in (query, key, value, grad)]


def run(inputs: list[Tensor], modes: Tensor | None, numerics: Numerics = "kernel") -> tuple[list[Tensor], Tensor]:
    """[out, lse, dQ, dK, dV] and the state."""
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    state = new_state(query.shape[1])
    out, lse = flash_attention(
        query,
        key,
        value,
        numerics=numerics,
        state=state,
        modes=modes,
        return_lse=True,
    )
    return [out.detach(), lse, *torch.autograd.grad(out, (query, key, value), inputs[3])], state


def flags(*modes: Mode) -> Tensor:
    return torch.tensor([int(mode) for mode in modes], dtype=torch.int32)


@pytest.mark.parametrize("numerics", ["kernel", "paper"])
@pytest.mark.parametrize("mode", all_modes(), ids=mode_name)
def test_mode_changes_only_its_head_and_stays_accurate(mode: Mode, numerics: Numerics) -> None:
    inputs = tied()
    plain, _ = run(inputs, None, numerics)
    switched, state = run(inputs, flags(Mode.PLAIN, mode, Mode.PLAIN, Mode.PLAIN), numerics)
    truth, _ = run([x.double() for x in inputs], None, "float64")
    for before, after, exact in zip(plain, switched, truth, strict=True):
        assert torch.equal(before[:, [0, 2, 3]], after[:, [0, 2, 3]])
        torch.testing.assert_close(after.double(), exact, rtol=2e-2, atol=2e-2)
    shifts = mode & Mode.PAPER_SOFTMAX
    assert torch.equal(plain[0], switched[0]) == (not shifts)
    assert torch.equal(plain[2], switched[2]) == (mode == Mode.PLAIN)
    shifted = slot_values(state.numpy(), Slot.SHIFTED_ROWS)
    assert shifted.tolist() == [0, 48 if shifts else 0, 0, 0]


def test_zero_modes_equal_no_modes() -> None:
    inputs = tied()
    without, with_zeros = run(inputs, None), run(inputs, torch.zeros(4, dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(without[0], with_zeros[0], strict=True))
    assert torch.equal(without[1], with_zeros[1])


@pytest.mark.parametrize("numerics", ["kernel", "paper"])
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize(("common", "remaining"), [(1.0, 0.25), (0.0, 0.75)])
def test_exact_delta_reduces_the_row_sum_defect_of_ds(
    common: float, remaining: float, length: int, numerics: Numerics
) -> None:
    """To a quarter if values share a component, as in the paper's failing head (figure 6a). If their mean is zero, more
    of the defect remains with `kernel`, because its forward rounds P and its backward does not."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, length, 64, generator=generator) for _ in range(4))
    value += common * torch.randn(1, 2, 1, 64, generator=generator)
    grad, query, key, value = (x.bfloat16() for x in (grad, query, key, value))
    spec = AttentionSpec(scale=1 / 8, numerics=numerics)
    plain, plain_rounded = row_sum_defect(grad, query, key, value, None, spec)
    flags_of_both_heads = flags(Mode.EXACT_DELTA, Mode.EXACT_DELTA)
    exact, exact_rounded = row_sum_defect(grad, query, key, value, flags_of_both_heads, spec)
    assert exact < remaining * plain
    assert exact_rounded < plain_rounded


def test_paper_shift_follows_algorithm_3_up_to_its_cap() -> None:
    row_max = torch.tensor([-200.0, -3.0, 0.0, 2.0, 350.0])
    assert paper_shift(row_max, torch.bfloat16).tolist() == [60.0, 3.0, 0.0, 2.0, 60.0]
    assert paper_shift(row_max, torch.float16).tolist() == [0.5, 0.5, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_paper_softmax_does_not_underflow_at_large_scores(dtype: torch.dtype, size: float) -> None:
    inputs = [x.to(dtype) for x in tied(batch=1, heads=1)]
    inputs[0] *= size
    (out, lse, *grads), state = run(inputs, flags(Mode.PAPER_SOFTMAX))
    (plain_out, plain_lse, *_), _ = run(inputs, None)
    assert all(torch.isfinite(x).all() for x in (out, lse, *grads))
    torch.testing.assert_close(out, plain_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-6, atol=1e-5)
    assert slot_values(state.numpy(), Slot.SHIFTED_ROWS).item() == 24


def test_rows_with_only_zero_scores_are_not_shifted() -> None:
    inputs = tied(batch=1, heads=2, length=10)
    inputs[0].zero_()
    (out, *_), state = run(inputs, flags(Mode.PLAIN, Mode.PAPER_SOFTMAX))
    assert slot_values(state.numpy(), Slot.SHIFTED_ROWS).tolist() == [0, 0]
    mean = inputs[2].double().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=2.0**-9)


def test_ties_are_found_across_the_whole_row() -> None:
    query, key, value, grad = tied(batch=1, heads=1, length=300)
    key[:, :, 150:] = torch.randn(1, 1, 150, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    best = (query[0, 0, 0] @ key[0, 0].mT).argmax()
    other = 299 if best < 150 else 0
    key[0, 0, other] = key[0, 0, best]
    _, state = run([query[:, :, :1], key, value, grad[:, :, :1]], flags(Mode.PAPER_SOFTMAX))
    assert slot_values(state.numpy(), Slot.TIED_ROWS_ONE).item() == 1
    assert slot_values(state.numpy(), Slot.SHIFTED_ROWS).item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tie_margin_is_where_exp_rounds_to_one(dtype: torch.dtype) -> None:
    margin = one_margin(dtype)
    near = torch.tensor([-margin * (1 - 1e-9), -margin * (1 + 1e-9)], dtype=torch.float64).exp().numpy()
    step = torch.finfo(dtype).eps / 2  # the spacing below 1
    distances = (1 - near) / step
    assert np.round(distances[0] - 1e-6) == 0  # closer to 1 than to the next number below
    assert np.round(distances[1] + 1e-6) == 1
    assert torch.tensor(math.exp(-0.99 * margin)).to(dtype) == 1
    assert torch.tensor(math.exp(-1.01 * margin)).to(dtype) < 1
