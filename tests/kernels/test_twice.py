"""Gradients of our attention that are differentiated again, or taken many at once, are those of PyTorch's attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.kernels.flash_attention import flash_attention, new_state


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


def test_many_gradients_at_once_are_those_that_are_taken_one_by_one() -> None:
    inputs = operands(4, 2, 5, 5)
    out = ours(*inputs, causal=True)
    directions = torch.randn(3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad(out, inputs, directions, is_grads_batched=True, retain_graph=True)
    for number, direction in enumerate(directions):
        one = torch.autograd.grad(out, inputs, direction, retain_graph=True)
        torch.testing.assert_close([g[number] for g in got], list(one), rtol=1e-9, atol=1e-11)


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
