"""Attention's error taken apart, on tensors whose truth is known."""

import torch
from tests.lab.planted import Attention, called
from torch import Tensor

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.statistics import new_state
from foreshock.lab.diagnosis.anatomy import examine
from foreshock.lab.diagnosis.head_anatomy import head_anatomy


def test_the_gradient_of_the_query_weight_is_taken_apart_as_training_made_it() -> None:
    call, model = called(Attention())
    examined = examine(call, "here")
    assert examined.weight_error is not None
    assert examined.weight_norm is not None
    x = model.embedding(torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))).detach().double()
    grad = model.get_parameter("attention.qkv.weight").grad
    assert grad is not None
    trained = grad[:16].view(2, 8, 16).double()
    query, key, value = (t.detach().double().requires_grad_() for t in (call.query, call.key, call.value))
    assert call.grad_out is not None
    flash_attention(query, key, value, causal="top_left", numerics="float64").backward(call.grad_out.double())  # type: ignore[no-untyped-call]
    assert query.grad is not None
    true = torch.einsum("bhsd,bse->hde", query.grad, x)
    torch.testing.assert_close(examined.weight_norm, true.flatten(1).norm(dim=1), rtol=1e-10, atol=0)
    torch.testing.assert_close(true + examined.weight_error[0], trained, rtol=1e-4, atol=1e-5)


def test_the_error_of_delta_is_what_the_agent_counts() -> None:
    call, _ = called(Attention())
    state = new_state(2)
    query, key, value = (x.detach().requires_grad_() for x in (call.query, call.key, call.value))
    out = flash_attention(query, key, value, causal="top_left", numerics="kernel", state=state)
    out.backward(call.grad_out)  # type: ignore[no-untyped-call]
    examined = examine(call, "here")
    counted = state.view(torch.float64)[:, Slot.DELTA_BIAS_SUM], state.view(torch.float64)[:, Slot.DELTA_BIAS_ABS]
    torch.testing.assert_close(examined.delta_error.sum((0, 2)), counted[0], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(examined.delta_error.abs().sum((0, 2)), counted[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(examined.by_feature.sum(1), counted[0], rtol=1e-5, atol=1e-9)
    offset = state.view(torch.float64)[:, Slot.SCORE_OFFSET_SUM] / state[:, Slot.ROWS]
    torch.testing.assert_close(examined.offset, offset, rtol=1e-5, atol=1e-9)
    assert int(state[:, Slot.TIED_ROWS_ONE].sum()) == int(examined.tied.sum())


def test_queries_that_are_turned_after_their_weight_are_not_taken_apart() -> None:
    def rotated(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] / 10.0 ** torch.arange(4)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)

    call, _ = called(Attention(rotated))
    examined = examine(call, "here")
    assert examined.weight_error is None
    anatomy = head_anatomy(0, 0, [examined, examined])
    assert -1 <= anatomy.similarity <= 1
    assert anatomy.weight_error_plain is None
    assert anatomy.key_shift_plain > 0


def test_wide_operands_are_examined_as_a_kernel_would_round_them() -> None:
    call, _ = called(Attention(), "float32")
    assert examine(call, "here").numerics == "kernel"
    assert examine(call, "here", "paper").numerics == "paper"
