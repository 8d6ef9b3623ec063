"""Statistics of the kernels: ties at any size and tile, maxima of either sign, delta bias of values of any size."""

import math

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.triton_calls import BY_BOTH, CUDA, DEVICE, INTERPRETED, Inputs, hidden, random_inputs, scaled
from torch.testing import assert_close

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention.spec import Arguments, CausalAlignment
from foreshock.kernels.flash_attention.triton_kernels import forward
from foreshock.kernels.flash_attention.triton_kernels.counting import raise_maximum

pytestmark = INTERPRETED


def one_row_per_head(
    size: float, dtype: torch.dtype, seed: int, heads: int = 24 if CUDA else 8, keys: int = 56
) -> Inputs:
    """One query per head over common keys, with scores of about `size`, so that the state shows every row's result."""
    inputs = random_inputs(1, keys, 32, heads=heads, kv_heads=1, dtype=torch.float32, seed=seed)
    query = inputs.query * size / 3
    return Inputs(*(x.to(dtype) for x in (query, *inputs[1:])))


@BY_BOTH
@pytest.mark.parametrize("size", [3e-7, 2e-6, 4e-5, 2e-4, 7e-3, 0.4] if CUDA else [3e-7, 2e-4, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_tiny_scores_match_float64(attention: object, size: float, dtype: torch.dtype) -> None:
    inputs = one_row_per_head(size, dtype, seed=25)
    given = attention(inputs, scaled(32))  # type: ignore[operator]
    query, key = (x.double() for x in inputs[:2])
    scores = (query @ key.mT * 32**-0.5)[0, :, 0]  # [H, Sk]
    largest, second = scores.topk(2, -1).values.unbind(-1)
    slack = 2.0**-22 * (query.abs() @ key.abs().mT)[0, :, 0].amax(-1)
    nearest = largest.float().bfloat16()
    half_step = (nearest.float() - torch.nextafter(nearest, -torch.ones_like(nearest)).float()).double() / 2
    edge = nearest.double() - half_step  # higher scores round to the same bf16 as the maximum
    certain = ((second - edge).abs() > slack) & ((largest - edge).abs() > slack)
    tied = torch.tensor(given.counts(Slot.TIED_ROWS_BF16)) > 0
    assert torch.equal(tied[certain.cpu()], (second >= edge)[certain].cpu())
    assert certain.float().mean() > 0.5


@BY_BOTH
@pytest.mark.parametrize("exponent", [13, 30])
def test_ties_of_huge_scores_are_counted(attention: object, exponent: int) -> None:
    heads, rows = 2, 19
    size = 2.0 ** (exponent / 2)
    shape = (1, heads, rows, 64)
    same = torch.full(shape, size, dtype=torch.bfloat16, device=DEVICE)
    single_maximum = -same.clone()
    single_maximum[:, :, 1:] *= 2  # only the first key has the largest score
    value, grad = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    for key, want in ((same, rows), (single_maximum, 0)):
        given = attention(Inputs(same, key, value.to(DEVICE), grad.to(DEVICE)), scaled(64))  # type: ignore[operator]
        assert given.counts(Slot.TIED_ROWS_BF16) == [want] * heads
        assert given.counts(Slot.TIED_ROWS_ONE) == [want] * heads


@pytest.mark.parametrize(("causal", "window"), [("none", -1), ("top_left", -1), ("bottom_right", -1), ("none", 0)])
def test_second_largest_score_of_every_row_is_saved(causal: CausalAlignment, window: int) -> None:
    inputs = random_inputs(70, 75, 32, heads=4, kv_heads=2, seed=26)
    spec = scaled(32, causal=causal, window_left=window, window_right=window)
    query, key, value, _ = inputs
    given = Arguments(None, None, None, 70, 75, None, spec)
    _, _, _, largest, second = forward.attention_forward(query, key, value, given)
    scores = spec.scale * query.double() @ key.double().repeat_interleave(2, 1).mT
    exact = scores.masked_fill(hidden(spec, 70, 75), -math.inf).topk(2, -1).values
    assert_close(largest.double(), exact[..., 0], rtol=0, atol=2e-5)
    assert_close(second.double(), exact[..., 1], rtol=0, atol=2e-5)
    single_key = exact[..., 1] == -math.inf
    assert torch.equal(second == -math.inf, single_key)
    assert bool(single_key.any()) == (causal == "top_left" or window == 0)


def test_two_equal_keys_give_bitwise_equal_largest_scores_at_any_position() -> None:
    query, key, value, _ = random_inputs(32, 200, 32, heads=1, seed=27)
    key[..., 1:, :] *= 0.01
    key[..., 0, :] = 4.0
    query = query.abs()
    for place in (1, 2, 31, 64, 199):
        key_pair = key.clone()
        key_pair[..., place, :] = 4.0
        given = Arguments(None, None, None, 32, 200, None, scaled(32))
        _, _, _, largest, second = forward.attention_forward(query, key_pair, value, given)
        assert torch.equal(largest, second)
        assert not bool((forward.attention_forward(query, key, value, given)[4] == largest).any())


def test_forward_without_statistics_saves_no_second_largest_score() -> None:
    query, key, value, _ = random_inputs(32, 32, 32, seed=28)
    given = Arguments(None, None, None, 32, 32, None, scaled(32))
    assert forward.attention_forward(query, key, value, given, counted=False)[4].numel() == 0
    no_residual = given._replace(spec=scaled(32, residual=False))
    assert forward.attention_forward(query, key, value, no_residual)[4].numel() == 0


@triton.jit
def raise_maximum_kernel(word, value):  # type: ignore[no-untyped-def]
    raise_maximum(word, tl.load(value))


@BY_BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [300.0, 2e-5, 3e-7])
def test_delta_bias_is_correct_for_values_of_any_size(attention: object, dtype: torch.dtype, size: float) -> None:
    inputs = random_inputs(
        61, 30, 32, dtype=dtype, seed=26
    )  # one tile of keys, so P is rounded relative to one maximum
    inputs = inputs._replace(value=(inputs.value.float() * size).to(dtype))
    spec = scaled(32)
    given = attention(inputs, spec)  # type: ignore[operator]
    query, key, value, grad = (x.double() for x in inputs)
    scores = query @ key.mT * 32**-0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = weights.float().to(dtype).double()  # kernels multiply rounded weights, but sum unrounded ones
    rounding_error = given.out.double() - rounded @ value / weights.sum(-1, keepdim=True)
    want = (rounding_error * grad).sum(-1).abs().sum((0, 2))
    assert given.counts(Slot.DELTA_BIAS_ABS) == pytest.approx(want.tolist(), rel=0.05)


@pytest.mark.parametrize("start", [-3.5, -0.0, 0.0, 2.25, -math.inf])
@pytest.mark.parametrize("value", [-7.0, -3.25, -0.0, 0.0, 4.5, -math.inf])
def test_raise_maximum_takes_the_larger_number_for_either_sign(start: float, value: float) -> None:
    word = torch.tensor([start], dtype=torch.float64, device=DEVICE)
    given = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    raise_maximum_kernel[(1,)](word.view(torch.int64), given)
    assert word.item() == max(start, value)
