"""Attention is found however its function is reached, and attention by hand is named."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.monitor.model.discovery import find_attention


def helper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def helper_of_a_helper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return helper(query, key, value)


def closure_over(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query, key, value)

    return attend


class Processor:
    """As in diffusers: an object that is given the module."""

    def __call__(self, attention: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return helper(query, key, value)


class Attention(nn.Module):
    """Has what attention has, but leaves the call to those below."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(6, 6), nn.Linear(6, 6)


class ThroughAHelper(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return helper_of_a_helper(x, x, x)


class ThroughAStaticMethod(Attention):
    @staticmethod
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class ThroughAnAttribute(Attention):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.function(x, x, x))


class ByHand(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


class XSoftmax(torch.autograd.Function):
    """A softmax under another name, as DeBERTa's."""


class ByHandThroughWrappers(Attention):
    """As SqueezeBERT's and SEW-D's: neither function goes by its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul_qkv = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.matmul_qkv(XSoftmax.apply(x, -1)))  # type: ignore[no-untyped-call]


class ByHandWithLogSumExp(Attention):
    """As Reformer's."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x, x.mT)
        return torch.matmul(torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)), x)


class ThroughPyTorchsFunction(Attention):
    """As WavLM's: nn.MultiheadAttention's function without its module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.multi_head_attention_forward(x, x, x, 6, 2, None, None, None, None, False, 0.0, x, None)[0]


@pytest.mark.parametrize(
    "module",
    [
        ThroughAHelper(),
        ThroughPyTorchsFunction(),
        ThroughAStaticMethod(),
        ThroughAnAttribute(closure_over(F.scaled_dot_product_attention)),
        ThroughAnAttribute(closure_over(helper)),
        ThroughAnAttribute(functools.partial(helper_of_a_helper)),
        ThroughAnAttribute(Processor()),
    ],
    ids=[
        "helper",
        "multi_head_attention_forward",
        "static method",
        "closure over the function",
        "closure over a helper",
        "partial",
        "processor",
    ],
)
def test_attention_is_found_through_whatever_calls_it(module: nn.Module) -> None:
    (found,) = find_attention(nn.Sequential(nn.Linear(6, 6), module), {})
    assert found.problem is None
    assert (found.name, found.heads, found.head_dim) == ("1", 2, 3)


@pytest.mark.parametrize("kind", [ByHand, ByHandThroughWrappers, ByHandWithLogSumExp])
def test_attention_by_hand_is_named_and_a_module_that_only_takes_a_softmax_is_not(kind: type[Attention]) -> None:
    (found,) = find_attention(nn.Sequential(kind(), nn.Softmax(-1), nn.Linear(6, 6)), {})
    assert found.name == "0"
    assert found.problem is not None
    assert "by hand" in found.problem
