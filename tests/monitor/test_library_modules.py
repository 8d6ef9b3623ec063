"""Attention modules of TransformerEngine and Megatron, by stand-ins: their forward is met in its class."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.monitor.executions import watched
from tests.monitor.library_calls import BOUNDS, KEPT, Grouped, assert_alike, of_pytorch
from tests.monitor.library_calls import model_of as model_of_calls
from tests.monitor.stand_ins import flash_attn_2, megatron, transformer_engine
from tests.monitor.stand_ins.megatron import AttnMaskType
from tests.monitor.test_executions import STEPS, Mode
from tests.monitor.tiny_models import tiny_gpt
from torch import Tensor, nn

from foreshock.monitor.model.discovery import find_attention

Engine, Megatron = transformer_engine.DotProductAttention, megatron.DotProductAttention
CLASSES: tuple[type[nn.Module], ...] = (Engine, Megatron)


class WithCore(Grouped):
    """Leaves its attention to a module of a library, and its shapes to `ask`."""

    def __init__(self, core: nn.Module, ask: Callable[..., Tensor]) -> None:
        super().__init__(lambda q, k, v: ask(self.core_attention, q, k, v))
        self.core_attention = core


def tokens_first(core: nn.Module, *operands: Tensor, **options: Any) -> Tensor:
    """Operands [S, B, H, D]."""
    out: Tensor = core(*(x.transpose(0, 1) for x in operands), **options)
    return out.transpose(0, 1).reshape(operands[0].shape)


def batch_first(core: nn.Module, *operands: Tensor, **options: Any) -> Tensor:
    out: Tensor = core(*operands, qkv_format="bshd", **options)
    return out.view(operands[0].shape)


def packed(core: nn.Module, *operands: Tensor, **options: Any) -> Tensor:
    ends = {"cu_seqlens_q": BOUNDS, "cu_seqlens_kv": BOUNDS, "max_seqlen_q": 12, "max_seqlen_kv": 12}
    out: Tensor = core(*(x.flatten(0, 1) for x in operands), qkv_format="thd", **ends, **options)
    return out.view(operands[0].shape)


def asked(ask: Callable[..., Tensor], *more: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda core, *operands: ask(core, *operands, *more, **options)


def masked(core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    return tokens_first(core, query, key, value, attention_mask=mask)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, Any]]
CASES: dict[str, Case] = {
    "engine": (lambda: Engine(4, 4, 2), tokens_first, {"causal": True}),
    "engine, of two processes": (lambda: Engine(8, 4, 4, tp_size=2), tokens_first, {"causal": True}),
    "engine, batch first": (lambda: Engine(4, 4, 2), asked(batch_first, attn_mask_type="no_mask"), {}),
    "engine, window": (lambda: Engine(4, 4, 2, window_size=(3, 0)), batch_first, {"causal": True, "window": (3, 0)}),
    "engine, packed": (
        lambda: Engine(4, 4, 2),
        asked(packed, attn_mask_type="padding_causal"),
        {"causal": True, "ends": BOUNDS},
    ),
    "megatron": (lambda: Megatron(4, 2, 4), asked(tokens_first, attention_mask=None), {"causal": True}),
    "megatron, third layer": (
        lambda: Megatron(4, 2, 4, layer_number=3),
        asked(tokens_first, attention_mask=None),
        {"causal": True},
    ),
    "megatron, mask": (lambda: Megatron(4, 2, 4, AttnMaskType.padding), masked, {"causal": True}),
    "megatron, window": (
        lambda: Megatron(4, 2, 4, window_size=(3, 0)),
        asked(tokens_first, attention_mask=None),
        {"window": (3, 0)},
    ),
}


def model_of(make: Callable[[], nn.Module], ask: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(5)
    return tiny_gpt(*(WithCore(make(), ask) for _ in range(2)), seed=3)


@pytest.fixture(autouse=True)
def _classes_are_as_they_were() -> Iterator[None]:
    before = [dict(vars(each)) for each in CLASSES]
    yield
    assert [dict(vars(each)) for each in CLASSES] == before


@pytest.mark.parametrize("name", CASES)
def test_a_module_of_a_library_is_kept_to_the_last_bit_and_measured_as_pytorchs_own(name: str) -> None:
    make, ask, rule = CASES[name]
    plain = model_of(make, ask)
    losses = Mode().loop(plain, lambda loss: None)
    got = watched(model_of(make, ask), Mode().loop, **KEPT)
    for mine, own in zip(got.losses + got.weights, (*losses, *plain.parameters()), strict=True):
        assert torch.equal(mine, own)
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_alike(got, watched(model_of_calls(of_pytorch(rule)), Mode().loop, **KEPT))


def test_our_kernels_serve_a_module_of_a_library() -> None:
    make, ask, _ = CASES["engine"]
    plain = model_of(make, ask)
    losses = Mode().loop(plain, lambda loss: None)
    got = watched(model_of(make, ask), Mode().loop, attention="kernels")
    for mine, own in zip(got.losses + got.weights, (*losses, *plain.parameters()), strict=True):
        torch.testing.assert_close(mine, own.detach(), rtol=1e-5, atol=1e-6)
    assert "2 x kernels (" in got.report


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "core_attention_bias": (lambda: Engine(4, 4, 2), asked(tokens_first, core_attention_bias=torch.zeros(12, 12))),
    "attn_mask_type=padding_causal": (lambda: Engine(4, 4, 2), asked(tokens_first, attn_mask_type="padding_causal")),
    "softmax_type": (lambda: Engine(4, 4, 2, softmax_type="off-by-one"), tokens_first),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_of_a_module_leaves_its_calls_unmeasured_and_is_named(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    got = watched(model_of(*UNKNOWN[what]), Mode().loop, **KEPT)
    assert got.rows == [0] * 8
    assert f"it passes {what} to tests.monitor.stand_ins.transformer_engine, which is not probed" in caplog.text


class Outer(transformer_engine.DotProductAttention):
    """As Megatron's TEDotProductAttention."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out


def test_a_subclass_is_found_and_its_own_parts_are_no_layers_of_their_own() -> None:
    core = Outer(4, 4, 2)
    core.unfused = WithCore(Engine(4, 4, 2), tokens_first)
    found = find_attention(nn.Sequential(core), {})
    assert [(each.name, each.heads, each.kv_heads, each.problem) for each in found] == [("0", 4, 2, None)]


def test_of_a_module_that_calls_a_library_inside_the_inner_call_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def through_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, rule: dict[str, Any]) -> Any:
        return flash_attn_2.flash_attn_func(q, k, v, softmax_scale=scale, causal=rule["causal"])

    monkeypatch.setattr(transformer_engine.Fused, "apply", staticmethod(through_flash))
    make, ask, rule = CASES["engine"]
    got = watched(model_of(make, ask), Mode().loop, **KEPT)
    assert got.rows == [2 * 12 * STEPS] * 8
    assert_alike(got, watched(model_of_calls(of_pytorch(rule)), Mode().loop, **KEPT))
