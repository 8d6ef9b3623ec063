"""The kernels that measure sampled rows, against the same in PyTorch on the same rows."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.triton_calls import DEVICE, INTERPRETED
from torch import Tensor

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, Slot, Words, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, new_state
from foreshock.kernels.flash_attention.sampled_rows import count_sampled_rows, serves
from foreshock.monitor.attention import probe
from foreshock.monitor.attention.probed_rows import Call

pytestmark = INTERPRETED


def tensors(dtype: torch.dtype, length_q: int = 7, length_k: int = 18, dim: int = 16) -> list[Tensor]:
    """grad_out, out, query, key, value; scores drift by 4, so that rows tie once rounded."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(2, length, heads, dim, generator=generator).transpose(1, 2)

    grad, out, value = draw(length_q, 4), draw(length_q, 4), draw(length_k, 2)
    query, key = draw(length_q, 4).round() + 2, draw(length_k, 2).round() + 2
    return [x.to(DEVICE, dtype) for x in (grad, out, query, key, value)]


def both(call: list[Tensor], rows: int, heads: int, times: int = 1, **options: Any) -> tuple[Words, Words]:
    """The state after `times` measurements by the kernels, and by PyTorch."""
    spec = AttentionSpec(**{"scale": 0.2, **options})
    ours, truth = new_state(4, DEVICE), new_state(4, DEVICE)
    tick, ticks = (
        probe.new_ticks(3, torch.device(DEVICE))[1].clone(),
        probe.new_ticks(3, torch.device(DEVICE))[1].clone(),
    )
    sampling = probe.Sampling(rows, heads)
    masked = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE)  # which the kernels do not take
    grad, out, query, key, value = call
    assert serves(query, key, value, out, spec)
    for _ in range(times):
        count_sampled_rows(grad, out, query, key, value, ours, tick, rows, heads or 4, spec)
        probe._sample(sampling, Call(grad, out, query, key, value, masked), truth, ticks, spec)
    assert tick.item() == ticks.item()
    return ours.cpu().numpy(), truth.cpu().numpy()


def assert_same(ours: Words, truth: Words) -> None:
    for slot in (*COUNT_SLOTS, *MAX_SLOTS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ):
        np.testing.assert_allclose(
            slot_values(ours, slot), slot_values(truth, slot), rtol=3e-6, atol=3e-6, err_msg=slot.name
        )
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS, Slot.DELTA_BIAS_SUMSQ):
        np.testing.assert_allclose(
            slot_values(ours, slot), slot_values(truth, slot), rtol=1e-2, atol=1e-2, err_msg=slot.name
        )


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {}),
        (torch.bfloat16, {"causal": "top_left"}),
        (torch.bfloat16, {"causal": "bottom_right", "window_left": 5}),
        (torch.bfloat16, {"window_left": 3, "window_right": 2}),
        (torch.bfloat16, {"softcap": 15.0, "causal": "top_left"}),
        (torch.bfloat16, {"dropout_p": 0.1}),
    ],
)
def test_every_row_is_measured_as_in_pytorch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours, truth = both(tensors(dtype), 10**6, 0, **options)
    assert slot_values(ours, Slot.ROWS).tolist() == [14] * 4
    assert slot_values(ours, Slot.TIED_ROWS_BF16).sum() > 0
    assert_same(ours, truth)


def test_the_same_rows_are_drawn_of_the_same_heads() -> None:
    ours, truth = both(tensors(torch.bfloat16), 3, 3, times=2, causal="top_left")
    assert slot_values(ours, Slot.ROWS).tolist() != [0] * 4
    assert slot_values(ours, Slot.ROWS).sum() == 2 * 3 * 3
    assert_same(ours, truth)


def test_empty_rows_and_rows_that_are_not_finite_are_counted_apart() -> None:
    call = tensors(torch.bfloat16, length_q=18, length_k=7)
    call[2][0, 1, 15] = float("nan")
    call[3][1, 0, 3] = float("nan")
    ours, truth = both(call, 10**6, 0, causal="bottom_right")
    assert slot_values(ours, Slot.EMPTY_ROWS).tolist() == [22] * 4
    assert slot_values(ours, Slot.NONFINITE_ROWS).tolist() == [4, 5, 0, 0]
    assert_same(ours, truth)


def test_wide_operands_are_left_to_pytorch() -> None:
    _, out, query, key, value = tensors(torch.float32)
    assert not serves(query, key, value, out, AttentionSpec(scale=1.0))
