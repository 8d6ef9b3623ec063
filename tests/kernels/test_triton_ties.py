"""What the kernels count: ties at any size and tile, maxima of either sign, delta bias of values of every size."""

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


def row_a_head(size: float, dtype: torch.dtype, seed: int, heads: int = 24 if CUDA else 8, keys: int = 56) -> Inputs:
    """One query a head over common keys, scores of about `size`: the state then tells the verdict on every row."""
    inputs = random_inputs(1, keys, 32, heads=heads, kv_heads=1, dtype=torch.float32, seed=seed)
    query = inputs.query * size / 3
    return Inputs(*(x.to(dtype) for x in (query, *inputs[1:])))


@BY_BOTH
@pytest.mark.parametrize("size", [3e-7, 2e-6, 4e-5, 2e-4, 7e-3, 0.4] if CUDA else [3e-7, 2e-4, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_tiny_scores_are_those_of_float64(attention: object, size: float, dtype: torch.dtype) -> None:
    inputs = row_a_head(size, dtype, seed=25)
    given = attention(inputs, scaled(32))  # type: ignore[operator]
    query, key = (x.double() for x in inputs[:2])
    scores = (query @ key.mT * 32**-0.5)[0, :, 0]  # [H, Sk]
    largest, second = scores.topk(2, -1).values.unbind(-1)
    slack = 2.0**-22 * (query.abs() @ key.abs().mT)[0, :, 0].amax(-1)
    nearest = largest.float().bfloat16()
    half_step = (nearest.float() - torch.nextafter(nearest, -torch.ones_like(nearest)).float()).double() / 2
    edge = nearest.double() - half_step  # from here on scores round to the maximum's bf16
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
    alone = -same.clone()
    alone[:, :, 1:] *= 2  # the first key has the one maximum
    value, grad = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    for key, want in ((same, rows), (alone, 0)):
        given = attention(Inputs(same, key, value.to(DEVICE), grad.to(DEVICE)), scaled(64))  # type: ignore[operator]
        assert given.counts(Slot.TIED_ROWS_BF16) == [want] * heads
        assert given.counts(Slot.TIED_ROWS_ONE) == [want] * heads


@pytest.mark.parametrize(("causal", "window"), [("none", -1), ("top_left", -1), ("bottom_right", -1), ("none", 0)])
def test_the_second_largest_score_of_every_row_is_kept(causal: CausalAlignment, window: int) -> None:
    inputs = random_inputs(70, 75, 32, heads=4, kv_heads=2, seed=26)
    spec = scaled(32, causal=causal, window_left=window, window_right=window)
    query, key, value, _ = inputs
    given = Arguments(None, None, None, 70, 75, None, spec)
    _, _, _, largest, second = forward.attention_forward(query, key, value, given)
    scores = spec.scale * query.double() @ key.double().repeat_interleave(2, 1).mT
    exact = scores.masked_fill(hidden(spec, 70, 75), -math.inf).topk(2, -1).values
    assert_close(largest.double(), exact[..., 0], rtol=0, atol=2e-5)
    assert_close(second.double(), exact[..., 1], rtol=0, atol=2e-5)
    alone = exact[..., 1] == -math.inf
    assert torch.equal(second == -math.inf, alone)
    assert bool(alone.any()) == (causal == "top_left" or window == 0)


def test_two_equal_keys_make_the_largest_two_scores_equal_to_the_bit_wherever_they_lie() -> None:
    query, key, value, _ = random_inputs(32, 200, 32, heads=1, seed=27)
    key[..., 1:, :] *= 0.01
    key[..., 0, :] = 4.0
    query = query.abs()
    for place in (1, 2, 31, 64, 199):
        twice = key.clone()
        twice[..., place, :] = 4.0
        given = Arguments(None, None, None, 32, 200, None, scaled(32))
        _, _, _, largest, second = forward.attention_forward(query, twice, value, given)
        assert torch.equal(largest, second)
        assert not bool((forward.attention_forward(query, key, value, given)[4] == largest).any())


def test_a_forward_whose_backward_counts_nothing_keeps_none() -> None:
    query, key, value, _ = random_inputs(32, 32, 32, seed=28)
    given = Arguments(None, None, None, 32, 32, None, scaled(32))
    assert forward.attention_forward(query, key, value, given, counted=False)[4].numel() == 0
    alone = given._replace(spec=scaled(32, residual=False))
    assert forward.attention_forward(query, key, value, alone)[4].numel() == 0


@triton.jit
def raise_one(word, value):  # type: ignore[no-untyped-def]
    raise_maximum(word, tl.load(value))


@BY_BOTH
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
