"""The kernels that measure sampled rows, compared with PyTorch on the same rows."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.triton_calls import DEVICE, INTERPRETED
from torch import Tensor

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, Slot, Words, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, new_state
from foreshock.kernels.flash_attention.sampled_rows import count_sampled_rows, serves
from foreshock.monitor.attention.probe import new_ticks
from foreshock.monitor.attention.probed_rows import Call, measure, sizes

pytestmark = INTERPRETED


def tensors(
    dtype: torch.dtype, length_q: int = 7, length_k: int = 18, dim: int = 16, dim_v: int = 16, batch: int = 2
) -> Call:
    """Operands whose scores share an offset, so that rows tie after rounding."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(batch, length, heads, dim, generator=generator).transpose(1, 2)

    grad, out, value = draw(length_q, 4, dim_v), draw(length_q, 4, dim_v), draw(length_k, 2, dim_v)
    query, key = draw(length_q, 4, dim).round() + 2, draw(length_k, 2, dim).round() + 2
    return Call(*(x.to(DEVICE, dtype) for x in (grad, out, query, key, value)))


def kernel_and_pytorch_states(call: Call, rows: int, times: int = 1, **options: Any) -> tuple[Words, Words]:
    """The states after `times` measurements by the kernels and by PyTorch."""
    spec = AttentionSpec(**{"scale": 0.2, **options})
    kernel_state, pytorch_state = new_state(4, DEVICE), new_state(4, DEVICE)
    tick, ticks = (new_ticks(3, torch.device(DEVICE))[1].clone() for _ in range(2))
    sample_sizes = sizes(rows, *call.query.shape[::2])
    assert serves(call.query, call.key, call.value, call.out, spec)
    for _ in range(times):
        count_sampled_rows(*call, kernel_state, tick, sample_sizes, spec)
        measure(rows, call, pytorch_state, ticks, spec)
        ticks += 1
    assert tick.item() == ticks.item()
    return kernel_state.cpu().numpy(), pytorch_state.cpu().numpy()


def assert_same(kernel_state: Words, pytorch_state: Words) -> None:
    maxima = [slot for slot in MAX_SLOTS if slot not in (Slot.OUTPUT_ERROR_MAX, Slot.GRADIENT_ERROR_MAX)]
    sums = Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ, Slot.ENTROPY_SUM, Slot.MOST_ENTROPY_SUM
    for slot in (*COUNT_SLOTS, *maxima, *sums):
        np.testing.assert_allclose(
            slot_values(kernel_state, slot), slot_values(pytorch_state, slot), rtol=3e-6, atol=3e-6, err_msg=slot.name
        )
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS, Slot.DELTA_BIAS_SUMSQ, Slot.OUTPUT_ERROR_MAX):
        np.testing.assert_allclose(
            slot_values(kernel_state, slot), slot_values(pytorch_state, slot), rtol=1e-2, atol=1e-2, err_msg=slot.name
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
def test_statistics_of_all_rows_match_pytorch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    kernel_state, pytorch_state = kernel_and_pytorch_states(tensors(dtype), 10**6, **options)
    assert slot_values(kernel_state, Slot.ROWS).tolist() == [14] * 4
    assert slot_values(kernel_state, Slot.TIED_ROWS_BF16).sum() > 0
    assert_same(kernel_state, pytorch_state)


@pytest.mark.parametrize("options", [{}, {"softcap": 15.0}, {"rounds": "scores"}, {"rounds": "unknown"}])
def test_wrong_output_rows_are_counted_only_in_their_head(options: dict[str, Any]) -> None:
    call = tensors(torch.bfloat16, 40, 40)
    scores = call.query.float() @ call.key.float().repeat_interleave(2, 1).mT * 0.2
    scores = 15.0 * (scores / 15.0).tanh() if "softcap" in options else scores
    out = (scores.softmax(-1) @ call.value.float().repeat_interleave(2, 1)).bfloat16()
    out[1, 2, [3, 30]] *= -3
    kernel_state, pytorch_state = kernel_and_pytorch_states(call._replace(out=out), 10**6, **options)
    compared = options.get("rounds") != "unknown"
    assert slot_values(kernel_state, Slot.WRONG_ROWS).tolist() == [0, 0, 2 * compared, 0]
    assert slot_values(kernel_state, Slot.CHECKED_ROWS).tolist() == [80 * compared] * 4
    assert_same(kernel_state, pytorch_state)


def test_statistics_over_several_tiles_match_pytorch() -> None:
    kernel_state, pytorch_state = kernel_and_pytorch_states(
        tensors(torch.bfloat16, 90, 150, 24, batch=1), 10**6, causal="bottom_right", window_left=70
    )
    assert slot_values(kernel_state, Slot.ROWS).tolist() == [90] * 4
    assert_same(kernel_state, pytorch_state)


def test_values_may_be_narrower_than_keys() -> None:
    kernel_state, pytorch_state = kernel_and_pytorch_states(
        tensors(torch.bfloat16, dim=40, dim_v=24), 10**6, causal="top_left"
    )
    assert slot_values(kernel_state, Slot.DELTA_BIAS_ABS).min() > 0
    assert_same(kernel_state, pytorch_state)


def masks(length_q: int, length_k: int) -> dict[str, Tensor]:
    """Masks of several kinds; the first four hide the same keys, all of them in one row of the second batch entry."""
    seen = torch.rand(2, 1, length_q, length_k, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[1, :, 0] = False
    zeros, far = torch.zeros(seen.shape), torch.arange(length_k) - torch.arange(length_q).view(-1, 1)
    return {
        "bool": seen,
        "-1e9": zeros.masked_fill(~seen, -1e9),
        "-1e4 in bf16": zeros.masked_fill(~seen, -1e4).bfloat16(),
        "-inf of each head": zeros.masked_fill(~seen, -math.inf).repeat(1, 4, 1, 1),
        "keys only": (torch.arange(length_k) < 15).view(1, 1, 1, -1),
        "alibi": -9.0 * far.abs().float().view(1, 1, length_q, length_k) * torch.arange(1, 5).view(1, 4, 1, 1),
        "alibi by the position of the key": 9.0 * torch.arange(length_k).repeat(length_q, 1),
        "not finite": torch.where(seen & (far == 3), math.nan, 0.0),
    }


@pytest.mark.promise("A20")
@pytest.mark.parametrize("kind", list(masks(7, 18)))
def test_statistics_with_every_kind_of_mask_match_pytorch(kind: str) -> None:
    mask = masks(7, 18)[kind].to(DEVICE)
    kernel_state, pytorch_state = kernel_and_pytorch_states(tensors(torch.bfloat16)._replace(mask=mask), 10**6)
    assert_same(kernel_state, pytorch_state)
    if kind in ("bool", "-1e9", "-1e4 in bf16", "-inf of each head"):
        assert slot_values(kernel_state, Slot.EMPTY_ROWS).tolist() == [1] * 4
        plain = kernel_and_pytorch_states(
            tensors(torch.bfloat16)._replace(mask=masks(7, 18)["bool"].to(DEVICE)), 10**6
        )[0]
        np.testing.assert_allclose(
            slot_values(kernel_state, Slot.SCORE_OFFSET_SUM), slot_values(plain, Slot.SCORE_OFFSET_SUM), rtol=1e-6
        )
    if kind == "not finite":
        assert slot_values(kernel_state, Slot.NONFINITE_ROWS).min() > 0


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"causal": "top_left"}, {"window_left": 3}])
def test_statistics_of_packed_sequences_match_pytorch(options: dict[str, Any]) -> None:
    bounds = {
        "cu_queries": torch.tensor([0, 3, 3, 11, 20], dtype=torch.int32, device=DEVICE),
        "cu_keys": torch.tensor([0, 7, 9, 9, 22], dtype=torch.int32, device=DEVICE),
    }
    for rows in (10**6, 20):
        kernel_state, pytorch_state = kernel_and_pytorch_states(
            tensors(torch.bfloat16, 24, 26, batch=1)._replace(**bounds), rows, **options
        )
        assert (
            slot_values(kernel_state, Slot.EMPTY_ROWS).min() > 0
        )  # rows without keys and rows after the last sequence
        assert_same(kernel_state, pytorch_state)


@pytest.mark.parametrize(("batch", "length", "rows"), [(2, 24, 33), (40, 18, 64), (3, 50, 120)])
def test_kernels_and_pytorch_sample_the_same_rows(batch: int, length: int, rows: int) -> None:
    call = tensors(torch.bfloat16, length, length, batch=batch)
    entries, count = sizes(rows, batch, length)
    kernel_state, pytorch_state = kernel_and_pytorch_states(call, rows, times=2, causal="top_left")
    assert slot_values(kernel_state, Slot.ROWS).tolist() == [2 * entries * count] * 4
    assert rows <= entries * count < batch * length
    assert_same(kernel_state, pytorch_state)


def test_empty_and_nonfinite_rows_are_counted_separately() -> None:
    call = tensors(torch.bfloat16, length_q=18, length_k=7)
    call.query[0, 1, 15] = float("nan")
    call.key[1, 0, 3] = float("nan")
    call.out[0, 2, 16, 0] = float("inf")
    call.grad_out[1, 3, 17, 0] = float("nan")
    kernel_state, pytorch_state = kernel_and_pytorch_states(call, 10**6, causal="bottom_right")
    assert slot_values(kernel_state, Slot.EMPTY_ROWS).tolist() == [22] * 4
    assert slot_values(kernel_state, Slot.NONFINITE_ROWS).tolist() == [4, 5, 1, 1]
    assert slot_values(kernel_state, Slot.NONFINITE_INPUT_ROWS).tolist() == [4, 5, 0, 0]
    assert slot_values(kernel_state, Slot.NONFINITE_OUTPUT_ROWS).tolist() == [0, 0, 1, 0]
    assert_same(kernel_state, pytorch_state)


def test_float32_operands_use_pytorch() -> None:
    call = tensors(torch.float32)
    assert not serves(call.query, call.key, call.value, call.out, AttentionSpec(scale=1.0))
