"""Attention is found however its function is reached, and attention by hand is named."""

import functools
import types
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


class ThroughAModule(Attention):
    """The helper is an attribute of a Python module."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, written_elsewhere.attend(x, x, x))


class ThroughAClass(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return Operations.attend(x, x, x)


class ThroughAnObject(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.attend_too(x, x, x)


class ThroughATable(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return TABLE["sdpa"](x, x, x)


class ByItsNameInAString(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, getattr(F, "scaled_dot_product_attention")(x, x, x))  # noqa: B009


class ThroughSuper(ThroughAHelper):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


class Operations:
    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def attend_too(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(query, key, value)


TABLE = {"sdpa": helper}
written_elsewhere: Any = types.ModuleType("written_elsewhere")
written_elsewhere.attend = helper_of_a_helper


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
        ThroughSuper(),
        ThroughAModule(),
        ThroughAClass(),
        ThroughAnObject(),
        ThroughATable(),
        ByItsNameInAString(),
        ThroughAnAttribute(closure_over(helper)),
        ThroughAnAttribute(functools.partial(helper_of_a_helper)),
        ThroughAnAttribute(Processor()),
    ],
    ids=[
        "helper",
        "multi_head_attention_forward",
        "static method",
        "super",
        "attribute of a module",
        "class",
        "method of an object",
        "table",
        "string",
        "closure over a helper",
        "partial",
        "processor",
    ],
)
def test_attention_is_found_through_whatever_calls_it(module: nn.Module) -> None:
    (found,) = find_attention(nn.Sequential(nn.Linear(6, 6), module), {})
    assert found.problem is None
    assert (found.name, found.heads, found.head_dim) == ("1", 2, 3)


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


def no_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query + key * value


def test_a_module_that_only_asks_whether_pytorch_has_the_function_computes_no_attention() -> None:
    class Asking(Processor):
        """As in diffusers: refuses an old PyTorch when it is made."""

        def __init__(self) -> None:
            if not hasattr(F, "scaled_dot_product_attention"):
                raise ImportError

    class Block(nn.Module):
        """Makes the object that its attention is given."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = ThroughAnAttribute(Asking())

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x)  # type: ignore[no-any-return]

    assert [found.name for found in find_attention(Block(), {})] == ["attention"]


def test_layers_of_one_class_are_told_apart_by_the_functions_that_each_was_given() -> None:
    given = (helper, no_attention, torch.softmax, closure_over(helper), closure_over(no_attention))
    model = nn.Sequential(*(ThroughAnAttribute(function) for function in given))
    assert [found.name for found in find_attention(model, {})] == ["0", "3"]


def test_what_a_class_does_is_read_anew_by_each_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return no_attention(x, x, x)

    model = nn.Sequential(Layer(), Layer())
    assert find_attention(model, {}) == []
    monkeypatch.setattr(Layer, "forward", ThroughAHelper.forward)
    assert [found.name for found in find_attention(model, {})] == ["0", "1"]
    monkeypatch.setitem(globals(), "helper", no_attention)
    assert find_attention(model, {}) == []


class Grouped(Attention):
    """As litgpt writes it: the configuration tells the heads."""

    def __init__(self) -> None:
        super().__init__()
        del self.heads, self.to_q, self.to_k
        self.config = types.SimpleNamespace(n_head=4, n_query_groups=2, head_size=8)
        self.qkv = nn.Linear(6, (4 + 2 * 2) * 8)

    def forward(self, x: Tensor) -> Tensor:
        return helper(x, x, x)


def test_groups_of_queries_that_a_configuration_tells_are_key_heads() -> None:
    (found,) = find_attention(Grouped(), {})
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 8)
    assert found.projection is not None
    assert len(found.projection.key.starts) == 2
