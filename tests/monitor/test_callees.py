"""Which functions a module's code calls is read without running any of it."""

import functools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as fused

from foreshock.monitor.model import callees

RAN: list[str] = []


def deep(x: Tensor) -> Tensor:
    return torch.tanh(x)


def helper(x: Tensor) -> Tensor:
    RAN.append("helper")
    return deep(x)


class Renamed(nn.Module):
    """It calls PyTorch's function under a name of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return fused(x, x, x)


class ThroughHelpers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x)


class Given(nn.Module):
    """Its function came as a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.core = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, x, x)


class SoftmaxAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q_proj(x) @ x.mT / math.sqrt(8), -1) @ x


class ExpOverSum(SoftmaxAttention):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.exp(torch.einsum("bqd,bkd->bqk", self.q_proj(x), x))
        return weights / weights.sum(-1, keepdim=True) @ x


class InTwoMethods(SoftmaxAttention):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weigh(torch.matmul(self.q_proj(x), x.mT)), x)


class Router(nn.Module):
    """A softmax and a product, but of experts: nothing here is attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.gate(x), -1) @ torch.ones(4, 8)


class AttentionThatOnlyCalls(nn.Module):
    """By its name attention, but no softmax of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    callees.forget()
    RAN.clear()
    yield
    assert RAN == []
    callees.forget()


def test_a_function_is_known_by_its_own_name_and_through_helpers_of_helpers() -> None:
    assert {"fused", "scaled_dot_product_attention"} <= callees.called_by(Renamed())
    assert {"helper", "deep", "tanh"} <= callees.called_by(ThroughHelpers())
    assert "tanh" not in callees.called_by(Renamed())


def test_what_a_module_keeps_is_found_inside_its_partials() -> None:
    kept = [value for value in callees.attributes_of(Given()) if callable(value)]
    assert F.scaled_dot_product_attention in kept
    assert F.scaled_dot_product_attention in [kept for kept in callees.kept_by(Given()) if callable(kept)]


@pytest.mark.parametrize("kind", [SoftmaxAttention, ExpOverSum, InTwoMethods])
def test_attention_by_hand_is_seen_however_it_is_written(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 5, 8)
    assert kind()(x).shape == x.shape  # it is a model that runs
    assert callees.is_by_hand(kind())


@pytest.mark.parametrize("kind", [Router, AttentionThatOnlyCalls, ThroughHelpers])
def test_what_is_no_attention_by_hand_is_not_taken_for_it(kind: type[nn.Module]) -> None:
    assert not callees.is_by_hand(kind())


def test_only_functions_and_classes_have_a_name_of_their_own() -> None:
    assert [callees.own_name(value) for value in (helper, Router, "helper", None, 3)] == [
        "helper",
        "Router",
        "",
        "",
        "",
    ]


def test_what_a_function_calls_after_it_was_replaced_is_seen_once_the_old_answer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "tanh" in callees.called_by(ThroughHelpers())
    monkeypatch.setitem(globals(), "helper", lambda x: torch.relu(x))
    callees.forget()
    assert "relu" in callees.called_by(ThroughHelpers())
    assert "tanh" not in callees.called_by(ThroughHelpers())
