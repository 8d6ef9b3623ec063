"""Attention that cannot be watched is named: written by hand, of another make, or PyTorch's where it cannot be met."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.foreign_attention import Attention, ByHand, ThroughAnAttribute, closure_over
from torch import Tensor, nn

from foreshock.monitor.model.discovery import find_attention


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


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


class Mixer(nn.Module):
    """Attention that is not called so, of a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        return by_hand(*self.to_qkv(x).chunk(3, -1))


class MHSA(Attention):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.baddbmm(torch.zeros(1, 1, 1), x, x.mT)
        return torch.einsum("bqk,bkd->bqd", F.softmax(scores, -1), x)


class ByHandWithExp(Attention):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.exp(x @ x.mT)
        return weights @ x / weights.sum(-1, keepdim=True)


class ByHandInTwoMethods(Attention):
    """As LayoutLMv3's."""

    def weigh(self, scores: Tensor) -> Tensor:
        return cast(Tensor, nn.Softmax(dim=-1)(scores - scores.amax(-1, keepdim=True)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weigh(torch.matmul(x, x.mT)), x)


class ByHandWithAModule(nn.Module):
    """As vit-pytorch's: the softmax is a module that goes by another name, and so does the layer of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.to_qkv(x).chunk(3, -1)
        return torch.matmul(self.attend(torch.matmul(query, key.mT)), value)


class AFunctionOfTheirOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return by_hand(x, x, x)


class ByAFunctionOfTheirOwn(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, AFunctionOfTheirOwn.apply(x))  # type: ignore[no-untyped-call]


class Router(nn.Module):
    """Takes a softmax and products, and is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.zeros(4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bse,bsd,edf->bsf", self.gate(x).softmax(-1), x, self.experts)


@pytest.mark.parametrize(
    "kind",
    [
        ByHand,
        ByHandThroughWrappers,
        ByHandWithLogSumExp,
        ByHandWithExp,
        ByHandInTwoMethods,
        ByHandWithAModule,
        Mixer,
        MHSA,
        ByAFunctionOfTheirOwn,
    ],
)
def test_attention_by_hand_is_named_and_a_module_that_only_takes_a_softmax_is_not(kind: type[nn.Module]) -> None:
    (found,) = find_attention(nn.Sequential(kind(), nn.Softmax(-1), Router()), {})
    assert found.name == "0"
    assert found.problem is not None
    assert "by hand" in found.problem


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    """The signature of the flash_attn package."""
    return by_hand(*qkv.unbind(2))


class memory_efficient:  # noqa: N801 - stands for the module xformers.ops
    @staticmethod
    def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None) -> Tensor:
        return by_hand(query, key, value)


class WithFlashAttn(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return flash_attn_qkvpacked_func(torch.stack([x, x, x], 2), causal=True)


class WithXformers(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return memory_efficient.memory_efficient_attention(x, x, x, attn_bias=None)


@pytest.mark.parametrize(
    "module", [WithFlashAttn(), WithXformers(), ThroughAnAttribute(functools.partial(flash_attn_qkvpacked_func))]
)
def test_attention_of_another_make_is_named_however_it_is_reached(module: nn.Module) -> None:
    (found,) = find_attention(nn.Sequential(module), {})
    assert found.problem is not None
    assert "another make" in found.problem


always_causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)


class ByAPartial(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return always_causal(x, x, x)


class ByADefault(Attention):
    def forward(self, x: Tensor, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> Tensor:
        return attend(x, x, x)


@pytest.mark.parametrize(
    "module",
    [
        ByAPartial(),
        ByADefault(),
        ThroughAnAttribute(F.scaled_dot_product_attention),
        ThroughAnAttribute(functools.partial(F.scaled_dot_product_attention)),
        ThroughAnAttribute(closure_over(F.scaled_dot_product_attention)),
    ],
    ids=["partial", "default", "attribute", "partial in an attribute", "closure"],
)
def test_pytorchs_function_where_it_cannot_be_met_is_named_before_the_first_step(module: nn.Module) -> None:
    (found,) = find_attention(nn.Sequential(module), {})
    assert found.problem is not None
    assert "cannot be met" in found.problem
