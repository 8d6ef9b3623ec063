"""Which parameters are not finite, and where in the model that points to."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foreshock.monitor.crisis import BrokenParameters, Crisis, broken_parameters, look_at, sentence


class Block(nn.Module):
    """An MLP in three parts, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]


def broken(module: nn.Module, grads: Any) -> Any:
    return (grads[0] * math.nan,)


def gradients(model: nn.Module) -> Any:
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]


def test_a_backward_that_breaks_names_the_module_at_which_it_broke() -> None:
    model = Block()
    model.second.register_full_backward_pre_hook(broken)
    model(torch.ones(2, 4)).sum().backward()
    [(found, _)] = look_at(gradients(model))
    assert found is not None
    assert found == BrokenParameters(4, 6, "second.bias", "third.weight")
    assert sentence("gradients", found) == (
        "4 of 6 gradients are not finite: "
        "the last one is that of second.bias, and third.weight, which follows it, is finite."
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_of_one_tensor_is_found(bad: float) -> None:
    model = Block()
    with torch.no_grad():
        model.third.weight[3, 2] = bad
    assert look_at(model.named_parameters())[0].broken == BrokenParameters(1, 6, "third.weight", "third.bias")


def test_finite_and_missing_tensors_are_no_finding() -> None:
    model = Block()
    others = [("step", torch.tensor(3)), ("empty", torch.empty(0))]
    huge = [("huge", torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16))]
    looked = look_at(gradients(model), [*model.named_parameters(), *others], huge)
    assert [each.broken for each in looked] == [None] * 3
    assert looked[-1].largest == ("huge", torch.finfo(torch.float16).max)


class Quantised(Tensor):
    """A tensor whose numbers are something else, which refuses every operation on them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in func.__name__:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_tensors_that_hold_no_plain_numbers_are_left_alone() -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 4, device="meta"), nn.LazyLinear(4))
    others = [
        ("sparse", torch.eye(3).to_sparse()),
        ("eighth", torch.full((4,), math.nan).to(torch.float8_e4m3fn)),
        ("quantised", torch.full((4,), math.nan).as_subclass(Quantised)),
        ("complex", torch.full((4,), math.nan, dtype=torch.complex64)),
    ]
    assert [each.broken for each in look_at(model.named_parameters(), others)] == [None, None]


def test_all_of_them_is_said_as_all() -> None:
    [(found, _)] = look_at([("a", torch.tensor([math.nan])), ("b", torch.tensor([math.inf]))])
    assert found is not None
    assert sentence("weights", found) == "None of 2 weights is finite."


def said_of(model: nn.Module, *optimizers: torch.optim.Optimizer, finite_loss: bool = True) -> str:
    return broken_parameters(model, optimizers, finite_loss=finite_loss).sentence


def test_what_gradients_and_the_loss_show_together_is_said_and_nothing_of_gradients_that_are_gone() -> None:
    model = Block()
    assert said_of(model) == said_of(model, finite_loss=False) == "Weights are finite."
    model(torch.ones(2, 4)).sum().backward()
    assert "norm overflows" in said_of(model)
    assert "look at the labels" in said_of(model, finite_loss=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert "The loss was finite: look at how it is computed" in said_of(model)
    assert "The loss was finite" not in said_of(model, finite_loss=False)


def test_gradients_whose_norm_overflows_are_traced_to_the_largest() -> None:
    model = Block()
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 3e30 if place == 2 else 1.0)
    assert "The largest one, 3e+30, is that of second.weight." in said_of(model)


def test_an_optimizer_that_nobody_gave_is_found_and_its_learning_rate_named() -> None:
    model, other = Block(), Block()
    kept = [
        torch.optim.SGD(each.parameters(), lr=lr, momentum=0.9) for each, lr in ((model, math.nan), (other, math.inf))
    ]
    model(torch.ones(2, 4)).sum().backward()
    assert "learning rate" not in said_of(model)
    kept[0].step()
    assert "The gradients are finite, so an update of the optimizer broke these weights" in said_of(model)
    assert "The optimizer's learning rate is nan." in said_of(model)
    model, kept[0] = Block(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    kept[0] = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    kept[0].state[model.first.weight]["momentum_buffer"] = torch.tensor(math.nan)
    assert "The optimizer's state is not finite" in said_of(model)


@pytest.mark.parametrize(
    ("optimizer", "eps"),
    [
        (None, "Adam's default eps of 1e-08 is 0"),
        (lambda model: torch.optim.Adam(model.parameters(), eps=1e-9), "the eps of 1e-09 is 0"),
        (lambda model: torch.optim.Adam(model.parameters(), eps=1e-4), None),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), None),
    ],
)
def test_broken_weights_in_float16_are_traced_to_an_epsilon_that_is_0_there(optimizer: Any, eps: str | None) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = Block().to(dtype)
        given = [] if optimizer is None else [optimizer(model)]
        assert "float16" not in said_of(model, *given)
        torch.nn.init.constant_(model.second.weight, math.nan)
        said = said_of(model, *given)
        assert (eps is not None and dtype == torch.float16) == ("Weights are in float16" in said)
        assert eps is None or dtype != torch.float16 or eps in said


class Reads(TorchFunctionMode):
    """Counts what waits for a device: a number of a tensor that the host asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__")
        self.count += getattr(func, "__name__", "") in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("blocks", [1, 30])
def test_the_device_is_waited_for_once_whatever_the_number_of_tensors(blocks: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(blocks)), Block().half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        optimizer.state[model[0].first.weight]["momentum_buffer"][0, 0] = math.inf  # type: ignore[index, union-attr]
    with Reads() as reads:
        found = broken_parameters(model, [optimizer], finite_loss=True)
    assert found.weights
    assert "optimizer's state is not finite" in found.sentence
    assert reads.count == 1


def looks(losses: dict[int, float], norms: dict[int, float], end: int, weights_break: int = 10**9) -> list[int]:
    """The steps up to `end`, after the first, at which a crisis of 50 steps looks at the parameters."""
    model, seen = Block(), []

    def give() -> nn.Module:
        seen.append(step)
        if step >= weights_break:
            torch.nn.init.constant_(model.first.weight, math.nan)
        return model

    crisis = Crisis(give, list, 50, lambda _: None)
    for step in range(1, end):
        crisis.look(step, losses.get(step, 1.0), norms.get(step, 1.0))
    assert seen[0] == 1
    return seen[1:]


def test_a_crisis_looks_once_at_gradients_at_each_broken_loss_and_never_at_a_healthy_step() -> None:
    nan = math.nan
    every = dict.fromkeys(range(10, 200), nan)
    assert looks({}, {}, 200) == []
    assert looks({}, every, 200) == [10, 60, 110, 160]
    assert looks({20: nan, 22: nan}, every, 40) == [10, 20, 22]
    assert looks(every, every, 200) == [*range(10, 61), 110, 160]
    assert looks(every, every, 200, weights_break=12) == [10, 11, 12]


@pytest.mark.parametrize(
    ("step", "loss", "watched"), [(2, 8.5, True), (100, 8.5, True), (101, 8.5, False), (2, 7.9, False)]
)
def test_a_loss_of_twice_the_first_one_has_early_steps_sampled(step: int, loss: float, watched: bool) -> None:
    for kind in (float, torch.tensor):
        steps: list[int] = []
        crisis = Crisis(Block, list, 50, steps.append)
        for each in range(1, step + 1):
            assert crisis.look(each, kind(loss if each == step else 4.0), 1.0) is None
        assert steps == [step] * watched


def test_a_gradient_that_breaks_alone_is_traced_to_the_operation_that_uses_its_parameter() -> None:
    model = Block()
    model(torch.ones(2, 4)).sum().backward()
    assert model.second.bias.grad is not None
    model.second.bias.grad[0] = math.nan
    assert "It alone is broken, so look at the operation that uses it" in said_of(model)
