"""What the last pass of the backward counts: maxima of either sign, delta bias of values of every size."""

import math

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.triton_calls import (
    BY,
    DEVICE,
    INTERPRETED,
    random_inputs,
    scaled,
)

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention.triton_kernels.counting import raise_maximum

pytestmark = INTERPRETED


@triton.jit
def raise_one(word, value):  # type: ignore[no-untyped-def]
    raise_maximum(word, tl.load(value))


@BY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [300.0, 2e-5, 3e-7])
def test_delta_bias_holds_for_values_of_every_size(attention: object, dtype: torch.dtype, size: float) -> None:
    inputs = random_inputs(61, 30, 32, dtype=dtype, seed=26)  # one tile of keys: one maximum to round P by
    inputs = inputs._replace(value=(inputs.value.float() * size).to(dtype))
    spec = scaled(32)
    given = attention(inputs, spec)  # type: ignore[operator]
    query, key, value, grad = (x.double() for x in inputs)
    scores = query @ key.mT * 32**-0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = weights.float().to(dtype).double()  # a kernel multiplies rounded weights, and sums them unrounded
    lost = given.out.double() - rounded @ value / weights.sum(-1, keepdim=True)
    want = (lost * grad).sum(-1).abs().sum((0, 2))
    assert given.counts(Slot.DELTA_BIAS_ABS) == pytest.approx(want.tolist(), rel=0.05)


@pytest.mark.parametrize("start", [-3.5, -0.0, 0.0, 2.25, -math.inf])
@pytest.mark.parametrize("value", [-7.0, -3.25, -0.0, 0.0, 4.5, -math.inf])
def test_the_state_takes_the_larger_of_two_numbers_of_either_sign(start: float, value: float) -> None:
    word = torch.tensor([start], dtype=torch.float64, device=DEVICE)
    given = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    raise_one[(1,)](word.view(torch.int64), given)
    assert word.item() == max(start, value)
