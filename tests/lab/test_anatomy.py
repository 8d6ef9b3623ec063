"""Attention's error taken apart, on tensors whose truth is known."""

import pytest
import torch
from tests.lab.planted import Attention, called, planted
from torch import Tensor, nn

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


def test_equation_2_gives_the_difference_that_exact_delta_makes() -> None:
    attention = Attention()
    nn.init.constant_(attention.qkv.bias[32:], 32.0)  # a large O loses much to its rounding: delta's error leads
    call, _ = called(attention)
    anatomy = head_anatomy(0, 1, [examine(call, "here")])
    assert anatomy.equation_2 is not None
    cosine, length = anatomy.equation_2
    assert cosine > 0.99  # dS and dQ are rounded to bf16 besides
    assert length == pytest.approx(1.0, abs=0.05)
    assert anatomy.weight_error_plain is not None
    assert anatomy.weight_error_exact is not None
    assert anatomy.weight_error_plain > anatomy.weight_error_exact > 0


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
    assert anatomy.similarity is None
    assert anatomy.weight_error_plain is None
    assert anatomy.key_shift_plain > 0


def test_wide_operands_are_examined_as_a_kernel_would_round_them() -> None:
    call, _ = called(Attention(), "float32")
    assert examine(call, "here").numerics == "kernel"
    assert examine(call, "here", "paper").numerics == "paper"


def test_the_numbers_of_a_planted_head_come_out() -> None:
    alike = head_anatomy(0, 0, [planted(tokens=torch.ones(6, 1, 4, dtype=torch.float64)) for _ in range(4)])
    assert alike.similarity == pytest.approx(1.0)
    assert alike.spectrum[0] == pytest.approx(1.0)
    assert alike.top_positions[0] == pytest.approx((3, 1.0))
    assert alike.top_features[0] == pytest.approx((1, 0.75, 1.0))
    assert alike.one_sidedness == pytest.approx(1.0)
    assert alike.tied_share_of_error == pytest.approx(1.0)
    assert alike.weight_coherence_plain == pytest.approx(4.0)  # four identical errors
    assert alike.weight_error_rank_one == pytest.approx(1.0)
    assert alike.weight_error_plain == pytest.approx(2 * 20**0.5 / 10)
    assert alike.delta_share_of_weight_error == pytest.approx(0.75)
    assert alike.delta_share_of_key_shift == pytest.approx(1.0)
    assert alike.equation_2 == pytest.approx((1.0, 1.0))
    assert alike.push_plain > 100  # -(sum of dK) . mean key is 8 in every batch
    apart = head_anatomy(0, 0, [planted(tokens=torch.eye(4, dtype=torch.float64)[:, None])])
    assert apart.similarity == pytest.approx(0.0)
    assert apart.spectrum[0] == pytest.approx(0.25)
