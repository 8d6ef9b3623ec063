"""Gradients of the log-sum-exp, of gradients, and many at once: those of autograd through PyTorch's own operators."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.triton_calls import hidden, scaled
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.contract.modes import parse_mode
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state

Case = tuple[int, int, int, dict[str, Any]]
CASES: list[Case] = [
    (19, 19, 1, {"causal": "top_left"}),
    (13, 29, 2, {"causal": "bottom_right"}),
    (29, 13, 2, {"causal": "bottom_right"}),  # the first rows see no key
    (23, 23, 1, {"window": (4, 0)}),
    (17, 21, 2, {"softcap": 3.0}),
]
MODES = ("plain", "exact_delta", "row_corrected", "exact_delta+row_corrected")


def leaves(length_q: int, length_k: int, kv_heads: int, dtype: torch.dtype, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 2, length_q, 16), (2, kv_heads, length_k, 16), (2, kv_heads, length_k, 16))
    shared = 2.0 * torch.randn(16, generator=generator)  # of all keys, so that correcting rows does something
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[1] += shared
    return [x.to(dtype).requires_grad_() for x in made]


def by_hand(inputs: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """O and the log-sum-exp by PyTorch's own operators; a row that sees no key has O = 0, and no log-sum-exp."""
    query, key, value = inputs
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    left, right = options.get("window", (-1, -1))
    spec: AttentionSpec = scaled(16, causal=options.get("causal", "none"), window_left=left, window_right=right)
    scores = query @ key.mT * 0.25
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    unseen = hidden(spec, query.shape[2], key.shape[2]).cpu()
    scores = scores.masked_fill(unseen, -math.inf)
    empty = unseen.all(-1)
    lse = scores.masked_fill(empty[:, None], 0.0).logsumexp(-1).masked_fill(empty, 0.0)
    out = scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0) @ value
    return out, lse


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    """Each row weighs otherwise in both; rows without a key leave the log-sum-exp alone."""
    weights = torch.linspace(-1.0, 2.0, lse.numel(), dtype=lse.dtype).view(lse.shape)
    finite = torch.where(lse == -math.inf, 0.0, lse)
    return (out * out.detach().cos()).sum() + (weights * finite).sum() + 0.1 * finite.square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_through_the_log_sum_exp_are_those_of_autograd(case: Case, mode: str) -> None:
    length_q, length_k, kv_heads, options = case
    modes = torch.tensor([int(parse_mode(mode)), 0], dtype=torch.int32)
    inputs = leaves(length_q, length_k, kv_heads, torch.float64)
    expected = torch.autograd.grad(loss_of(*by_hand(inputs, options)), inputs)
    out, lse = flash_attention(*inputs, **options, numerics="float64", modes=modes, return_lse=True)
    for ours, theirs in zip(torch.autograd.grad(loss_of(out, lse), inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("numerics", ["kernel", "paper"])
def test_gradients_through_the_log_sum_exp_are_near_in_bf16_too(numerics: str, mode: str) -> None:
    modes = torch.tensor([int(parse_mode(mode)), 0], dtype=torch.int32)
    inputs = leaves(31, 31, 2, torch.bfloat16, seed=8)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    options: dict[str, Any] = {"causal": "top_left"}
    expected = torch.autograd.grad(loss_of(*by_hand(exact, options)), exact)
    out, lse = flash_attention(*inputs, **options, numerics=numerics, modes=modes, return_lse=True)  # type: ignore[call-overload]
    for ours, theirs in zip(torch.autograd.grad(loss_of(out, lse), inputs), expected, strict=True):
        assert (ours.double() - theirs).norm() < 0.02 * theirs.norm()


def test_the_log_sum_exp_alone_may_be_used() -> None:
    inputs = leaves(14, 14, 1, torch.float64)
    expected = torch.autograd.grad(by_hand(inputs, {})[1].sum(), inputs[:2])
    _, lse = flash_attention(*inputs, numerics="float64", return_lse=True)
    grads = torch.autograd.grad(lse.sum(), inputs)
    for ours, theirs in zip(grads, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not grads[2].any()


def test_two_halves_of_the_keys_merged_by_their_log_sum_exps_have_the_gradients_of_the_whole() -> None:
    inputs = leaves(12, 26, 2, torch.float64)
    query, key, value = inputs

    def half(part: slice) -> tuple[Tensor, Tensor]:
        return flash_attention(query, key[:, :, part], value[:, :, part], numerics="float64", return_lse=True)

    (one, of_one), (other, of_other) = half(slice(0, 9)), half(slice(9, None))
    share = torch.sigmoid(of_one - of_other).unsqueeze(-1)
    merged, whole = share * one + (1 - share) * other, flash_attention(*inputs, numerics="float64")
    torch.testing.assert_close(merged, whole, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(-2, 1, whole.numel(), dtype=torch.float64).view(whole.shape)
    for ours, theirs in zip(
        torch.autograd.grad((merged * weights).sum(), inputs),
        torch.autograd.grad((whole * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_statistics_and_other_gradients_do_not_notice_that_the_log_sum_exp_is_there() -> None:
    inputs = leaves(21, 21, 1, torch.bfloat16)
    found = []
    for used in (False, True):
        state = new_state(2)
        out, lse = flash_attention(*inputs, causal=True, state=state, return_lse=True)
        loss = out.float().square().sum() + (0.0 * lse.square().sum() if used else 0.0)
        found.append((*torch.autograd.grad(loss, inputs), state))
    for without, with_it in zip(*found, strict=True):
        assert torch.equal(without, with_it)


def test_a_compiled_graph_takes_the_gradient_too() -> None:
    inputs = leaves(16, 16, 2, torch.float64)

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return loss_of(*flash_attention(query, key, value, causal=True, numerics="float64", return_lse=True))

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_second_derivative_through_the_log_sum_exp_is_refused_with_a_sentence() -> None:
    inputs = leaves(8, 8, 2, torch.float64)
    _, lse = flash_attention(*inputs, numerics="float64", return_lse=True)
    with pytest.raises(RuntimeError, match="or a gradient of the log-sum-exp; watch this model with attention='keep'"):
        torch.autograd.grad(lse.sum(), inputs[0], create_graph=True)


def operands(heads: int, kv_heads: int, queries: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + queries)
    shapes = ((2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def ours(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    out = flash_attention(query, key, value, numerics="float64", **options)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("linear", [True, False], ids=["of a sum", "of squares"])
@pytest.mark.parametrize("shape", [(2, 2, 5, 5), (4, 2, 5, 5), (4, 1, 3, 6)])
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_a_gradient_of_a_gradient_is_that_of_pytorchs_attention(
    causal: Any, shape: tuple[int, int, int, int], linear: bool
) -> None:
    """Of a sum, autograd hands the backward a constant, and would take its result for one."""

    def twice(attention: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*inputs)
        first = torch.autograd.grad(out.sum() if linear else out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs)

    inputs = operands(*shape)
    with sdpa_kernel(SDPBackend.MATH):
        expected = twice(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=causal == "top_left", scale=0.7, enable_gqa=True
            ),
            inputs,
        )
    got = twice(lambda q, k, v: ours(q, k, v, causal=causal, scale=0.7), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batched", [False, True], ids=["differentiated again", "many at once"])
def test_a_backward_after_a_gradient_that_is_not_counted_counts_once(batched: bool) -> None:
    """As the loss's backward after the gradient of which a penalty is taken."""

    def counted(*, before: bool) -> list[Tensor]:
        state, inputs = new_state(4, "cpu"), operands(4, 2, 6, 6)
        out = ours(*inputs, causal=True, state=state)
        nothing = state.clone()
        if before and batched:
            torch.autograd.grad(
                out, inputs, torch.ones(3, *out.shape).double(), is_grads_batched=True, retain_graph=True
            )
        elif before:
            torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        assert torch.equal(state, nothing)
        states = []
        for _ in range(2):
            torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
            states.append(state.clone())
        assert not torch.equal(states[0], nothing)
        return states

    once, again = counted(before=True)
    assert torch.equal(once, again)
    assert torch.equal(once, counted(before=False)[0])


@pytest.mark.parametrize("options", [{"window": (2, 0)}, {"softcap": 3.0}, {"dropout_p": 0.5}])
def test_what_pytorchs_attention_does_not_do_is_refused_with_a_sentence(options: dict[str, Any]) -> None:
    query, key, value = operands(2, 2, 5, 5)
    out = ours(query, key, value, causal=True, **options)
    with pytest.raises(
        RuntimeError, match=r"does not support second derivatives .* watch this model with attention='keep'"
    ):
        torch.autograd.grad(out.sum(), query, create_graph=True)
