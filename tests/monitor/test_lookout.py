"""Attention that is not watched is looked out for in the first steps; what it costs ends there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from tests.monitor.unusual_attention import ByHand
from torch import Tensor, nn

from foreshock.monitor import attach
from foreshock.monitor.attention import coverage as module_of_lookouts
from foreshock.monitor.attention.coverage import Lookout

PYTORCHS = torch.autograd.backward


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    return [train_step(model, optimizer, step).item() for step in range(steps)]


def with_by_hand() -> Any:
    torch.manual_seed(0)
    return tiny_gpt(CausalSelfAttention(16, 2), ByHand())


def test_pytorchs_backward_is_its_own_again_after_two_steps_and_after_detach() -> None:
    model = with_by_hand()
    with attach(model, **EVERY_STEP):
        assert torch.autograd.backward is not PYTORCHS
        trained(model, 2)
        assert torch.autograd.backward is PYTORCHS
        model.blocks.append(ByHand())
    attach(model, **EVERY_STEP).close()
    assert torch.autograd.backward is PYTORCHS


@pytest.mark.promise("A14")
def test_looking_changes_no_bit_of_a_training() -> None:
    alone = trained(with_by_hand())
    model = with_by_hand()
    with attach(model, **{**EVERY_STEP, "attention": "keep"}):
        assert trained(model) == alone


def test_a_graph_that_cannot_be_read_stops_the_lookout_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(module_of_lookouts, "attention_in", fails)
    model = with_by_hand()
    with attach(model, **EVERY_STEP):
        trained(model)
        assert torch.autograd.backward is PYTORCHS


class Inner(nn.Module):
    """As in torchtitan: attention without a weight of its own."""

    num_heads = 2

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class WithProjections(nn.Module):
    """Holds W_Q and W_K beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ModuleDict({name: nn.Linear(16, 16) for name in "qkv"})
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (w(x).unflatten(-1, (2, 8)).transpose(1, 2) for w in self.w.values())
        out: Tensor = self.inner(query, key, value)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.promise("A24")
@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_attention_that_is_met_apart_from_its_projections_is_named_once(attention: Any) -> None:
    model = tiny_gpt(WithProjections(), WithProjections())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, **{**EVERY_STEP, "attention": attention}) as agent:
        for step in range(3):
            agent.step(train_step(model, optimizer, step))
        assert "not monitored" not in agent.report()
        *_, watched, weights = agent.report().splitlines()
    assert watched == "watched 2 of 2 attention layers"
    assert weights == "2 x W_Q and W_K (blocks.0.inner, blocks.1.inner): found by a call (w.q, w.k)"


def test_modules_of_another_model_are_no_news() -> None:
    model = with_by_hand()
    looking = Lookout(model, ["blocks.0", "blocks.1"], {})
    try:
        other = with_by_hand()
        other.blocks.append(ByHand())
        trained(other)
        trained(model)
        assert looking.news() == {}
    finally:
        looking.stop()


def test_an_attention_by_hand_in_the_place_of_a_known_one_is_news_with_the_next_backward() -> None:
    model = with_by_hand()
    looking = Lookout(model, ["blocks.0", "blocks.1"], {})
    try:
        trained(model)
        model.blocks[0] = ByHand()
        assert looking.news() == {}
        trained(model)
        assert looking.news() == {"blocks.0": "it computes its attention by hand"}
        assert looking.news() == {}
    finally:
        looking.stop()


def test_a_bare_child_of_a_known_attention_is_no_news() -> None:
    model = with_by_hand()
    looking = Lookout(model, ["blocks.0", "blocks.1"], {})
    try:
        model.blocks[0].dropout = nn.Dropout()
        assert looking.news() == {}
    finally:
        looking.stop()
