"""A projection with adapters is measured with what they add."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.layouts import DIM, HEADS, WIDTH, Holder, conv1d_with, layer_of, linear_with, separate
from torch import Tensor, nn

from foreshock.monitor.model.adapters import adapted
from foreshock.monitor.model.layers import find_projection
from foreshock.monitor.sampling.norms import ModelNorms


class PeftLinear(nn.Module):
    """The attributes of peft's lora.Linear, which is tested for real on the machine that has it."""

    def __init__(self, base: nn.Module, out: int, inputs: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(inputs, 2, bias=False) for name in ("first", "second", "idle")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, out, bias=False) for name in ("first", "second", "idle")})
        self.use_dora = {"first": False}
        self.scaling = {"first": 0.5, "second": 2.0, "idle": 9.0}
        self.active_adapters = ["first", "second"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    def effective(self) -> Tensor:
        total: Tensor = torch.tensor(0.0)
        for name in self.active_adapters:
            down: Any = self.lora_A[name]
            total = total + self.scaling[name] * self.lora_B[name](down(torch.eye(down.in_features))).t()
        return total


class ByHand(nn.Linear):
    """Parameters beside the weight, as in loralib."""

    def __init__(self, rows: Tensor, *, turned: bool = False) -> None:
        super().__init__(rows.shape[1], rows.shape[0])
        self.weight.data.copy_(rows)
        down, up = torch.randn(2, rows.shape[1]), torch.randn(rows.shape[0], 2)
        self.lora_A = nn.Parameter(down.t() if turned else down)
        self.lora_B = nn.Parameter(up.t() if turned else up)
        self.lora_alpha, self.r = 3, 2

    def effective(self) -> Tensor:
        turned = self.lora_A.shape[0] != 2
        return 1.5 * ((self.lora_A @ self.lora_B).t() if turned else self.lora_B @ self.lora_A)


class Wrapped(nn.Module):
    """Linear layers round a linear layer, with torchtune's names."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.linear = linear_with(rows)
        self.lora_a = nn.Linear(rows.shape[1], 2, bias=False)
        self.lora_b = nn.Linear(2, rows.shape[0], bias=False)
        self.alpha, self.rank = 4.0, 2

    def effective(self) -> Tensor:
        return 2 * self.lora_b(self.lora_a(torch.eye(self.lora_a.in_features))).t()  # type: ignore[no-any-return]


ADAPTERS: dict[str, Callable[[Tensor], Any]] = {
    "peft": lambda rows: PeftLinear(linear_with(rows), *rows.shape),
    "peft round Conv1D": lambda rows: PeftLinear(conv1d_with(rows), *rows.shape),
    "parameters": ByHand,
    "parameters, turned": lambda rows: ByHand(rows, turned=True),
    "torchtune's names": Wrapped,
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_projection_with_adapters_is_measured_with_them(kind: str) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)
    module = Holder(q_proj=ADAPTERS[kind](query.flatten(0, 1)), k_proj=ADAPTERS[kind](key.flatten(0, 1)))
    found = find_projection(module, HEADS, HEADS, DIM)
    assert found is not None
    assert "with adapters" in found.layout
    norms = ModelNorms([layer_of(HEADS)], [found])
    measured = [norms.measure().norms for _ in range(40)][-1]
    children: Any = module
    true = [
        w + child.effective().detach().view_as(w) for w, child in ((query, children.q_proj), (key, children.k_proj))
    ]
    torch.testing.assert_close(measured["query_norm"], torch.linalg.matrix_norm(true[0], 2), rtol=1e-3, atol=0)
    torch.testing.assert_close(measured["key_norm"], torch.linalg.matrix_norm(true[1], 2), rtol=1e-3, atol=0)
    both = torch.linalg.matrix_norm(true[0].mT @ true[1], 2)
    torch.testing.assert_close(measured["query_key_norm"], both, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("peft", {"disable_adapters": True}),
        ("peft", {"merged_adapters": ["first", "second"]}),
        ("parameters", {"merged": True}),
        ("torchtune's names", {"disabled": True}),
    ],
)
def test_adapters_that_are_off_or_merged_are_not_added_again(kind: str, change: dict[str, Any]) -> None:
    rows = torch.randn(HEADS * DIM, WIDTH)
    module = ADAPTERS[kind](rows)
    vars(module).update(change)
    assert torch.equal(adapted(module), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"use_dora": {"first": True}}, {"scaling": None}])
def test_adapters_of_an_unknown_kind_leave_their_projection_unmeasured(change: dict[str, Any]) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    adapter = ADAPTERS["peft"](torch.randn(HEADS * DIM, WIDTH))
    vars(adapter).update(change)
    module.q_proj = adapter
    assert find_projection(module, HEADS, HEADS, DIM) is None


def test_a_projection_that_peft_adapts_is_measured_with_its_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; its layout is tested on a stand-in")
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    module: Any = peft.inject_adapter_in_model(config, separate(query, key))
    found = find_projection(module, HEADS, HEADS, DIM)
    assert found is not None
    for rows, child in ((found.query, module.q_proj), (found.key, module.k_proj)):
        inputs = torch.eye(WIDTH)
        true = (child(inputs) - child.base_layer.bias).detach().t()
        torch.testing.assert_close(rows.read().weights.flatten(0, 1), true, rtol=1e-5, atol=1e-5)
        child.merge()
        torch.testing.assert_close(rows.read().weights.flatten(0, 1), true, rtol=1e-5, atol=1e-5)
