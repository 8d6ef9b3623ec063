"""Projections whose weight is no tensor of their own: reading it never runs code of the model, and no norm is of a
weight that nobody computes with."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, parametrize

from foreshock.monitor import attach
from foreshock.monitor.model.discovery import find_attention

HEADS, WIDTH = 3, 24


class Attention(nn.Module):
    """One layer of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for projection in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attention() -> Attention:
    torch.manual_seed(17)
    module = Attention()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


class Noisy(nn.Module):
    """A weight that is drawn anew at every reading, as quantisation-aware training does."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.01 * torch.randn_like(weight)


def three_steps(module: nn.Module, agent: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(23)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        loss = module(torch.randn(2, 7, WIDTH)).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if agent is not None:
            agent.step(loss.detach())
    return {**module.state_dict(), "next number": torch.randn(1)}


def observed(projection: nn.Linear) -> None:
    """As quantisation-aware training does: a module that remembers the largest weight it was ever shown."""
    parametrize.register_parametrization(projection, "weight", FakeQuantize(MovingAverageMinMaxObserver))  # type: ignore[no-untyped-call]


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "spectral norm": parametrizations.spectral_norm,
    "the older spectral norm": torch.nn.utils.spectral_norm,
    "noise": lambda projection: parametrize.register_parametrization(projection, "weight", Noisy()),
    "an observer": observed,
}


def changed(module: Attention, how: str) -> None:
    torch.manual_seed(29)
    for projection in (module.wq, module.wk):
        CHANGES[how](projection)


@pytest.mark.promise("A22")
@pytest.mark.parametrize("how", CHANGES)
def test_a_weight_that_begins_to_change_by_being_read_while_attached_is_never_read(how: str) -> None:
    module = attention()
    other = copy.deepcopy(module)
    changed(other, how)
    alone = three_steps(other)
    with attach(module, url=None, quiet=True, norms_every_steps=1, strict=True) as agent:
        changed(module, how)
        watched = three_steps(module, agent)
    assert alone.keys() == watched.keys()
    assert all(torch.equal(alone[name], watched[name]) for name in alone)


@pytest.mark.promise("A22")
def test_a_weight_that_the_model_keeps_for_a_while_is_the_one_it_computed() -> None:
    module = attention()
    parametrizations.weight_norm(module.wq)
    (found,) = find_attention(module, {})
    assert found.projection is not None
    with parametrize.cached():
        with torch.no_grad():
            found.projection.query.read()
        assert module.wq.weight.requires_grad


@pytest.mark.promise("A22")
@pytest.mark.parametrize("how", ["spectral norm", "noise"])
def test_a_weight_that_changes_by_being_read_is_never_read(how: str) -> None:
    module = attention()
    changed(module, how)
    alone = three_steps(copy.deepcopy(module))
    with attach(module, url=None, quiet=True, norms_every_steps=1, strict=True) as agent:
        watched = three_steps(module, agent)
        report = agent.report()
    assert alone.keys() == watched.keys()
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    assert (
        "norms are not measured: wq is torch's ParametrizedLinear, whose weight is computed again at every reading"
        in report
    )
    assert "watched 1 of 1" in report


@pytest.mark.parametrize("computed", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_weight_that_pytorch_computes_without_a_trace_is_measured(computed: Any) -> None:
    module = attention()
    computed(module.wq)
    (found,) = find_attention(module, {})
    assert found.projection is not None
    assert torch.equal(found.projection.query.read().weights.flatten(0, 1), module.wq.weight)


def test_adapters_of_an_unknown_kind_are_told_and_the_weight_under_them_is_not_taken_for_the_sum() -> None:
    class Rotated(nn.Module):
        """As peft's tuners: the weight of the layer under it as its own, computed with otherwise."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.turn = base, nn.Linear(WIDTH, WIDTH)

        @property
        def weight(self) -> Tensor:
            return self.base_layer.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(self.turn(x))  # type: ignore[no-any-return]

    module = attention()
    module.wk = Rotated(module.wk)  # type: ignore[assignment]
    (found,) = find_attention(module, {})
    assert found.problem is None
    assert found.head_dim == WIDTH // HEADS
    assert found.projection is None
    assert (
        found.unmeasured
        == f"wk is {__name__.partition('.')[0]}'s Rotated, whose weight is computed again at every reading"
    )


def test_a_parametrized_multihead_attention_is_watched_without_norms() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    parametrize.register_parametrization(module, "in_proj_weight", Noisy())
    (found,) = find_attention(module, {})
    assert found.problem is None
    assert found.projection is None


def test_a_weight_that_only_stands_for_numbers_kept_otherwise_is_not_read() -> None:
    class Quantised(Tensor):
        """As torchao's: whole numbers and a scale, which say that they are floats."""

        @staticmethod
        def __new__(cls, weight: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

        def __init__(self, weight: Tensor) -> None:
            self.numbers = weight.mul(127).to(torch.int8)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            if function is torch.ops.aten.detach.default:
                return args[0]
            raise NotImplementedError(f"{function} of quantised numbers")

    module = attention()
    module.wk.weight = nn.Parameter(Quantised(module.wk.weight.detach()), requires_grad=False)
    (found,) = find_attention(module, {})
    assert found.problem is None
    assert found.projection is None
    assert found.unmeasured == "the weight of wk is stored as Quantised"
