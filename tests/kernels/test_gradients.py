"""Log-sum-exp gradients, second derivatives and batched gradients, compared with autograd of PyTorch operators."""

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
    shared = 2.0 * torch.randn(
        16, generator=generator
    )  # a direction that all keys share, so that row correction has an effect
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs[1] += shared
    return [x.to(dtype).requires_grad_() for x in inputs]


def attention_by_operators(inputs: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """O and the log-sum-exp by PyTorch operators; both are 0 in rows that see no key."""
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
    """A loss with a different weight for each row; rows without a key do not contribute their log-sum-exp."""
    weights = torch.linspace(-1.0, 2.0, lse.numel(), dtype=lse.dtype).view(lse.shape)
    finite = torch.where(lse == -math.inf, 0.0, lse)
    return (out * out.detach().cos()).sum() + (weights * finite).sum() + 0.1 * finite.square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_sum_exp_gradients_match_autograd_in_float64(case: Case, mode: str) -> None:
    length_q, length_k, kv_heads, options = case
    modes = torch.tensor([int(parse_mode(mode)), 0], dtype=torch.int32)
    inputs = leaves(length_q, length_k, kv_heads, torch.float64)
    expected = torch.autograd.grad(loss_of(*attention_by_operators(inputs, options)), inputs)
    out, lse = flash_attention(*inputs, **options, numerics="float64", modes=modes, return_lse=True)
    for got, want in zip(torch.autograd.grad(loss_of(out, lse), inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("numerics", ["kernel", "paper"])
def test_log_sum_exp_gradients_are_accurate_in_bf16(numerics: str, mode: str) -> None:
    modes = torch.tensor([int(parse_mode(mode)), 0], dtype=torch.int32)
    inputs = leaves(31, 31, 2, torch.bfloat16, seed=8)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    options: dict[str, Any] = {"causal": "top_left"}
    expected = torch.autograd.grad(loss_of(*attention_by_operators(exact, options)), exact)
    out, lse = flash_attention(*inputs, **options, numerics=numerics, modes=modes, return_lse=True)  # type: ignore[call-overload]
    for got, want in zip(torch.autograd.grad(loss_of(out, lse), inputs), expected, strict=True):
        assert (got.double() - want).norm() < 0.02 * want.norm()


def test_loss_may_depend_only_on_the_log_sum_exp() -> None:
    inputs = leaves(14, 14, 1, torch.float64)
    expected = torch.autograd.grad(attention_by_operators(inputs, {})[1].sum(), inputs[:2])
    _, lse = flash_attention(*inputs, numerics="float64", return_lse=True)
    grads = torch.autograd.grad(lse.sum(), inputs)
    for got, want in zip(grads, expected, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert not grads[2].any()


def test_attention_over_split_keys_merges_to_the_output_and_gradients_of_the_whole() -> None:
    inputs = leaves(12, 26, 2, torch.float64)
    query, key, value = inputs

    def half(part: slice) -> tuple[Tensor, Tensor]:
        return flash_attention(query, key[:, :, part], value[:, :, part], numerics="float64", return_lse=True)

    (one, lse_of_one), (other, lse_of_other) = half(slice(0, 9)), half(slice(9, None))
    share = torch.sigmoid(lse_of_one - lse_of_other).unsqueeze(-1)
    merged, whole = share * one + (1 - share) * other, flash_attention(*inputs, numerics="float64")
    torch.testing.assert_close(merged, whole, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(-2, 1, whole.numel(), dtype=torch.float64).view(whole.shape)
    for got, want in zip(
        torch.autograd.grad((merged * weights).sum(), inputs),
        torch.autograd.grad((whole * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_zero_log_sum_exp_gradient_changes_neither_gradients_nor_statistics() -> None:
    inputs = leaves(21, 21, 1, torch.bfloat16)
    found = []
    for used in (False, True):
        state = new_state(2)
        out, lse = flash_attention(*inputs, causal=True, state=state, return_lse=True)
        loss = out.float().square().sum() + (0.0 * lse.square().sum() if used else 0.0)
        found.append((*torch.autograd.grad(loss, inputs), state))
    for without, with_it in zip(*found, strict=True):
        assert torch.equal(without, with_it)


def test_compiled_graph_supports_log_sum_exp_gradients() -> None:
    inputs = leaves(16, 16, 2, torch.float64)

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return loss_of(*flash_attention(query, key, value, causal=True, numerics="float64", return_lse=True))

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_second_derivative_of_the_log_sum_exp_is_rejected() -> None:
    inputs = leaves(8, 8, 2, torch.float64)
    _, lse = flash_attention(*inputs, numerics="float64", return_lse=True)
    with pytest.raises(RuntimeError, match="or a gradient of the log-sum-exp; watch this model with attention='keep'"):
        torch.autograd.grad(lse.sum(), inputs[0], create_graph=True)


def operands(heads: int, kv_heads: int, queries: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads + queries)
    shapes = ((2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def foreshock_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    out = flash_attention(query, key, value, numerics="float64", **options)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("linear", [True, False], ids=["sum", "squares"])
@pytest.mark.parametrize("shape", [(2, 2, 5, 5), (4, 2, 5, 5), (4, 1, 3, 6)])
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_second_derivatives_match_pytorchs_attention(
    causal: Any, shape: tuple[int, int, int, int], linear: bool
) -> None:
    """For a sum, autograd passes a constant to the backward, and could treat the result as constant too."""

    def second_derivatives(attention: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*inputs)
        first = torch.autograd.grad(out.sum() if linear else out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs)

    inputs = operands(*shape)
    with sdpa_kernel(SDPBackend.MATH):
        expected = second_derivatives(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=causal == "top_left", scale=0.7, enable_gqa=True
            ),
            inputs,
        )
    got = second_derivatives(lambda q, k, v: foreshock_attention(q, k, v, causal=causal, scale=0.7), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batched", [False, True], ids=["second derivative", "batched"])
def test_backward_after_an_uncounted_gradient_counts_once(batched: bool) -> None:
    """For example, the backward of a loss after the gradient for a gradient penalty."""

    def count_states(*, before: bool) -> list[Tensor]:
        state, inputs = new_state(4, "cpu"), operands(4, 2, 6, 6)
        out = foreshock_attention(*inputs, causal=True, state=state)
        initial = state.clone()
        if before and batched:
            torch.autograd.grad(
                out, inputs, torch.ones(3, *out.shape).double(), is_grads_batched=True, retain_graph=True
            )
        elif before:
            torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        assert torch.equal(state, initial)
        states = []
        for _ in range(2):
            torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
            states.append(state.clone())
        assert not torch.equal(states[0], initial)
        return states

    once, again = count_states(before=True)
    assert torch.equal(once, again)
    assert torch.equal(once, count_states(before=False)[0])


@pytest.mark.parametrize("options", [{"window": (2, 0)}, {"softcap": 3.0}, {"dropout_p": 0.5}])
def test_second_derivatives_of_unsupported_options_are_rejected(options: dict[str, Any]) -> None:
    query, key, value = operands(2, 2, 5, 5)
    out = foreshock_attention(query, key, value, causal=True, **options)
    with pytest.raises(
        RuntimeError, match=r"does not support second derivatives .* watch this model with attention='keep'"
    ):
        torch.autograd.grad(out.sum(), query, create_graph=True)
