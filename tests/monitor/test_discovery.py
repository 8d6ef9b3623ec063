"""Attention is found however its function is reached; what is no attention is not."""

import functools
import types
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.monitor import foreign_attention
from tests.monitor.foreign_attention import (
    Attention,
    Processor,
    ThroughAHelper,
    ThroughAnAttribute,
    closure_over,
    helper,
    helper_of_a_helper,
)
from torch import Tensor, nn

from foreshock.monitor.model.discovery import find_attention


class KeepsWhatItsChildrenHad(nn.Module):
    """As a UNet of diffusers whose projections were fused: the processors of before are kept to put them back."""

    def __init__(self, processor: object) -> None:
        super().__init__()
        self.attention = ThroughAHelper()
        self.processors_of_before = {"attention": processor}

    def put_back(self) -> None:
        self.attention.processor = self.processors_of_before["attention"]  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.attention(x))


def test_what_a_module_keeps_for_another_is_no_attention_of_its_own() -> None:
    assert [found.name for found in find_attention(KeepsWhatItsChildrenHad(Processor()), {})] == ["attention"]


class ThroughAStaticMethod(Attention):
    @staticmethod
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


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
    monkeypatch.setattr(foreign_attention, "helper", no_attention)
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


class KeysOfTheirOwnWidth(Attention):
    """Nobody tells how many key heads it has but the width of its key projection."""

    def __init__(self, heads: int, head_dim: int, key_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(6, heads * head_dim), nn.Linear(6, key_width)

    def forward(self, x: Tensor) -> Tensor:
        return helper(x, x, x)


@pytest.mark.parametrize(
    ("heads", "head_dim", "key_width", "kv_heads"),
    [(6, 5, 10, 2), (6, 5, 5, 1), (4, 7, 28, 4), (6, 5, 12, 0), (6, 5, 20, 0), (6, 5, 60, 0), (6, 5, 3, 0)],
)
def test_the_width_of_a_key_projection_tells_its_key_heads_or_nothing_does(
    heads: int, head_dim: int, key_width: int, kv_heads: int
) -> None:
    module = KeysOfTheirOwnWidth(heads, head_dim, key_width)
    (found,) = find_attention(module, {})
    assert (found.problem, found.heads, found.kv_heads, found.head_dim) == (None, heads, kv_heads, head_dim)
    assert (found.projection is None) == (kv_heads == 0)
    if found.projection is not None:
        keys = found.projection.key.read().weights
        assert torch.equal(keys, module.to_k.weight.view(kv_heads, head_dim, -1))


def test_key_heads_that_nothing_tells_are_unknown_and_those_of_weights_that_cannot_be_read_are_not() -> None:
    class Alone(Attention):
        """Its keys are made by a projection of no known name."""

        def __init__(self) -> None:
            super().__init__()
            self.head_dim = self.to_q.out_features // self.heads
            self.shared = self.to_k
            del self.to_k

        def forward(self, x: Tensor) -> Tensor:
            return helper(x, x, x)

    (found,) = find_attention(Alone(), {})
    assert (found.problem, found.kv_heads, found.projection) == (None, 0, None)

    scaled = KeysOfTheirOwnWidth(4, 7, 14)
    scaled.to_k.weight = nn.Parameter(scaled.to_k.weight.detach().mul(99).to(torch.int8), requires_grad=False)
    (found,) = find_attention(scaled, {})
    assert (found.kv_heads, found.projection) == (2, None)
    assert "int8" in found.unmeasured
