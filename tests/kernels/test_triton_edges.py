"""The edges of what the kernels serve: sizes near the ends of their types, odd strides, tiny and huge scores."""

import math

import pytest
import torch
import triton
import triton.language as tl
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
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import new_state, op
from foreshock.kernels.flash_attention.counting import raise_maximum
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.op import attention_backward, attention_forward
from foreshock.kernels.flash_attention.spec import Arguments

pytestmark = INTERPRETED


@triton.jit
def raise_one(word, value):  # type: ignore[no-untyped-def]
    raise_maximum(word, tl.load(value))


BY = pytest.mark.parametrize("attention", [attend, attend_by_reference], ids=["kernels", "reference"])


@pytest.fixture(autouse=True)
def _kernels_serve_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the operators take the reference; here they are to take what this suite is about."""
    if not CUDA:
        monkeypatch.setattr(op, "_kernels", lambda query, spec: op._triton() if spec.numerics == "kernel" else None)


@BY
@pytest.mark.parametrize("softcap", [2e5, 5e7])
def test_a_softcap_far_above_every_score_is_none(attention: object, softcap: float) -> None:
    inputs = random_inputs(45, 39, 32, seed=21)
    capped, plain = (attention(inputs, scaled(32, softcap=cap)) for cap in (softcap, 0.0))  # type: ignore[operator]
    exact = truth(inputs, scaled(32))
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        error, allowed = (largest_error(getattr(x, name), getattr(exact, name)) for x in (capped, plain))
        assert error <= 1.5 * allowed, name


@BY
@pytest.mark.parametrize("softcap", [0.02, 3.0])
def test_a_softcap_is_as_exact_near_its_knee_as_without_one(attention: object, softcap: float) -> None:
    inputs = random_inputs(45, 39, 32, seed=22)
    spec = scaled(32, softcap=softcap)
    given, exact = attention(inputs, spec), truth(inputs, spec)  # type: ignore[operator]
    assert largest_error(given.lse, exact.lse) < 2e-6 * (1 + softcap)


def test_more_planes_than_a_launch_takes_are_refused_with_a_sentence() -> None:
    many = torch.empty(8192, 8, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    given = Arguments(None, None, None, 1, 1, None, scaled(16))
    with pytest.raises(ValueError, match=r"8192 sequences of 8 heads are 65536 planes; .* split the batch"):
        call_of(many, many, many, given)
    assert call_of(many[1:], many[1:], many[1:], given).sequences == 8191


FAR = 2**31 - 1


@BY
@pytest.mark.parametrize(
    ("window", "same_as"),
    [
        ((-1, FAR), (-1, -1)),
        ((FAR, -1), (-1, -1)),
        ((9, FAR), (9, -1)),
        ((FAR - 39, 4), (-1, 4)),
        ((2**40, 2**40), (-1, -1)),
    ],
)
@pytest.mark.parametrize("lengths", [(41, 23)])
def test_a_window_wider_than_any_tensor_is_unlimited(
    attention: object, window: tuple[int, int], same_as: tuple[int, int], lengths: tuple[int, int]
) -> None:
    inputs = random_inputs(*lengths, 32, seed=23)
    given, want = (
        attention(inputs, scaled(32, window_left=left, window_right=right))  # type: ignore[operator]
        for left, right in (window, same_as)
    )
    for name, one, other in zip(given._fields, given, want, strict=True):
        assert torch.equal(one, other), name


def through_the_operators(inputs: Inputs, modes: Tensor | None, lengths: Tensor | None) -> list[Tensor]:
    """out, gradients and state by the operators, which people's tensors reach as they are."""
    query, key, value, grad = inputs
    spec = scaled(query.shape[3], causal="top_left")
    longest = (query.shape[2], key.shape[2])
    sizes = (modes, lengths, lengths, *longest, None, spec.text)
    state = new_state(query.shape[1], query.device)
    out, *saved = attention_forward(query, key, value, state, *sizes)
    grads = attention_backward(grad, query, key, value, out, *saved, state, *sizes)
    return [out, *saved, *grads, state]


@pytest.mark.parametrize("numerics_on", ["kernels", "reference"])
def test_flags_and_lengths_may_be_a_column_of_a_table_or_one_number_expanded(
    numerics_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if numerics_on == "reference":
        monkeypatch.setattr(op, "_kernels", lambda query, spec: None)
    inputs = random_inputs(37, 37, 32, heads=4, kv_heads=2, seed=24)
    table = torch.tensor([[2, 9], [0, 9], [1, 9], [4, 9]], dtype=torch.int32, device=DEVICE)
    one = torch.tensor([2, 0, 0, 0, 0], dtype=torch.int32, device=DEVICE)[:1].expand(4)
    starts = torch.tensor([[0, 7], [15, 7], [15, 7], [37, 7]], dtype=torch.int32, device=DEVICE)
    for modes, lengths in ((one, None), (table[:, 0], starts[:, 0])):
        given = through_the_operators(inputs, modes, lengths)
        packed = [None if x is None else x.contiguous() for x in (modes, lengths)]
        for one_of, other in zip(given, through_the_operators(inputs, *packed), strict=True):
            assert torch.equal(one_of, other)


def row_a_head(size: float, dtype: torch.dtype, seed: int, heads: int = 24 if CUDA else 8, keys: int = 56) -> Inputs:
    """One query a head over common keys, scores of about `size`: the state then tells the verdict on every row."""
    inputs = random_inputs(1, keys, 32, heads=heads, kv_heads=1, dtype=torch.float32, seed=seed)
    query = inputs.query * size / 3
    return Inputs(*(x.to(dtype) for x in (query, *inputs[1:])))


@BY
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


@BY
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


def test_rows_past_a_length_told_too_small_are_nan_and_all_others_right() -> None:
    inputs = random_inputs(40, 40, 32, seed=27)
    starts = torch.tensor([0, 11, 36], dtype=torch.int32, device=DEVICE)  # and four rows of no sequence
    spec = scaled(32, causal="top_left")
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    right = attend(inputs, spec, longest=(25, 25), **options)  # type: ignore[arg-type]
    short = attend(inputs, spec, longest=(20, 20), **options)  # type: ignore[arg-type]
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        given, wanted = getattr(short, name), getattr(right, name)
        assert given[:, :, 31:36].isnan().all(), name
        assert torch.equal(given[:, :, 36:], wanted[:, :, 36:]), name
        whole = 31 if name in ("out", "lse", "grad_query") else 11  # a key is seen by queries that were lost
        assert torch.equal(given[:, :, :whole], wanted[:, :, :whole]), name


@pytest.mark.parametrize("start", [-3.5, -0.0, 0.0, 2.25, -math.inf])
@pytest.mark.parametrize("value", [-7.0, -3.25, -0.0, 0.0, 4.5, -math.inf])
def test_the_state_takes_the_larger_of_two_numbers_of_either_sign(start: float, value: float) -> None:
    word = torch.tensor([start], dtype=torch.float64, device=DEVICE)
    given = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    raise_one[(1,)](word.view(torch.int64), given)
    assert word.item() == max(start, value)


@pytest.mark.parametrize(("packed", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_what_memory_held_before_reaches_no_result(
    packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_inputs(23, 23, 24, heads=6, kv_heads=2, dtype=dtype, seed=28)
    modes = torch.tensor([0, 1, 2, 8, 16, 32], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 5, 5, 20], dtype=torch.int32, device=DEVICE)
    spec = scaled(24, causal="top_left", window_left=12)
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "longest": (15, 15)} if packed else {}
    results = []
    for float_word, word in ((0.0, 0), (math.nan, 77)):
        for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            plain = getattr(home, name)

            def filled(
                *given: object, _plain: object = plain, _words: tuple[float, int] = (float_word, word), **named: object
            ) -> Tensor:
                made: Tensor = _plain(*given, **named)  # type: ignore[operator]
                return made.fill_(_words[0] if made.is_floating_point() else _words[1])

            monkeypatch.setattr(home, name, filled)
        results.append(attend(inputs, spec, modes=modes, **options))  # type: ignore[arg-type]
        monkeypatch.undo()
    for name, one, other in zip(results[0]._fields, *results, strict=True):
        assert torch.equal(one, other), name
