"""Which parameters are not finite, and where in the model that points to."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foreshock.monitor.crisis import BrokenParameters, broken_among, sentence


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
    found = broken_among(gradients(model))
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
    assert broken_among(model.named_parameters()) == BrokenParameters(1, 6, "third.weight", "third.bias")


def test_finite_and_missing_tensors_are_no_finding() -> None:
    model = Block()
    assert broken_among(gradients(model)) is None
    assert broken_among([*model.named_parameters(), ("step", torch.tensor(3)), ("empty", torch.empty(0))]) is None
    assert broken_among([("huge", torch.full((4,), torch.finfo(torch.float16).max, dtype=torch.float16))]) is None


def test_all_of_them_is_said_as_all() -> None:
    found = broken_among([("a", torch.tensor([math.nan])), ("b", torch.tensor([math.inf]))])
    assert found is not None
    assert sentence("weights", found) == "None of 2 weights is finite."
