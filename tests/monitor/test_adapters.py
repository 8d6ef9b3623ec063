"""The norms of a projection with adapters are unknown, and the reason is told: what it computes with is no weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.layouts import DIM, HEADS, WIDTH, Holder, conv1d_with, linear_with
from torch import Tensor, nn

from foreshock.monitor.assessment import key_bias_of
from foreshock.monitor.model.discovery import Found
from foreshock.monitor.model.layers import base_of, find_projection, query_width, why_unmeasured


class PeftLinear(nn.Module):
    """The attributes of peft's lora.Linear, and its forward."""

    def __init__(self, base: nn.Module, out: int, inputs: int) -> None:
        super().__init__()
        self.base_layer = base
        self.out_features = out
        self.lora_A = nn.ModuleDict({"first": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"first": nn.Linear(2, out, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.lora_B["first"](self.lora_A["first"](x))
        return self.base_layer(x) + added  # type: ignore[no-any-return]


class ByHand(nn.Linear):
    """Parameters beside the weight, as in loralib."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows.shape[1], rows.shape[0])
        self.lora_A = nn.Parameter(torch.randn(2, rows.shape[1]))
        self.lora_B = nn.Parameter(torch.randn(rows.shape[0], 2))


class Wrapped(nn.Module):
    """Linear layers round a linear layer, with torchtune's names."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.linear = linear_with(rows)
        self.lora_a = nn.Linear(rows.shape[1], 2, bias=False)
        self.lora_b = nn.Linear(2, rows.shape[0], bias=False)


ADAPTERS: dict[str, Callable[[Tensor], Any]] = {
    "peft": lambda rows: PeftLinear(linear_with(rows), *rows.shape),
    "peft round Conv1D": lambda rows: PeftLinear(conv1d_with(rows), *rows.shape),
    "parameters": ByHand,
    "torchtune's names": Wrapped,
}


@pytest.mark.promise("A23")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_norms_under_adapters_are_unknown_and_the_reason_is_told(kind: str) -> None:
    query, key = (ADAPTERS[kind](torch.randn(HEADS * DIM, WIDTH)) for _ in range(2))
    module = Holder(q_proj=query, k_proj=key)
    assert find_projection(module, HEADS, HEADS, DIM) is None
    assert why_unmeasured(module) == f"q_proj is tests's {type(query).__name__}, which has adapters"
    assert query_width(module, HEADS, HEADS) == HEADS * DIM


def test_norms_under_pefts_own_adapters_are_unknown_and_the_reason_is_told() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; its layout is tested on a stand-in")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    plain = (linear_with(torch.randn(HEADS * DIM, WIDTH)) for _ in range(2))
    module: Any = peft.inject_adapter_in_model(config, Holder(**dict(zip(("q_proj", "k_proj"), plain, strict=True))))
    assert find_projection(module, HEADS, HEADS, DIM) is None
    assert why_unmeasured(module) == "q_proj is peft's Linear, which has adapters"


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("bias", ["trained", "frozen", "none"])
def test_the_bias_of_keys_under_adapters_is_that_of_their_base_layer(kind: str, bias: str) -> None:
    query, key = (ADAPTERS[kind](torch.randn(HEADS * DIM, WIDTH)) for _ in range(2))
    base: Any = base_of(key)
    base.bias = None if bias == "none" else nn.Parameter(torch.zeros(HEADS * DIM), requires_grad=bias == "trained")
    module = Holder(q_proj=query, k_proj=key)
    assert key_bias_of([Found("", module, HEADS, HEADS, DIM)]) == bias
