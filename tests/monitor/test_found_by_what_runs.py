"""What the first step calls decides what is attention, however the call is reached and whatever else code names."""

import functools
import gc
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from tests.monitor.watching import rows_of, watch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import attach, detach

pytestmark = pytest.mark.promise("A24")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@dataclass
class Backend:
    flash_attn_func: Callable[..., Tensor]


class OfAClass:
    flash_attn_func = staticmethod(attend)


namespace = types.SimpleNamespace(flash_attn_func=attend)
record = Backend(attend)
registry = {"flash_attn_func": attend}


def through_a_namespace(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return namespace.flash_attn_func(query, key, value)  # type: ignore[no-any-return]


def through_a_class(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return OfAClass.flash_attn_func(query, key, value)


def through_a_dataclass(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return record.flash_attn_func(query, key, value)


def through_a_registry(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return registry["flash_attn_func"](query, key, value)


def calls_way(held: Any) -> Callable[..., Tensor]:
    return lambda *operands: held.way(*operands, is_causal=True)


HOLDERS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "namespace": lambda own: (lambda held: lambda *x: held.way(*x, is_causal=True))(types.SimpleNamespace(way=own)),
    "record": lambda own: (lambda held: lambda *x: held.flash_attn_func(*x, is_causal=True))(Backend(own)),
    "registry": lambda own: (lambda held: lambda *x: held["sdpa"](*x, is_causal=True))({"sdpa": own}),
    "list": lambda own: (lambda held: lambda *x: held[0](*x, is_causal=True))([own]),
    "class": lambda own: calls_way(type("Held", (), {"way": own})),
    "static method": lambda own: calls_way(type("Held", (), {"way": staticmethod(own)})),
    "partial": lambda own: functools.partial(own, is_causal=True),
    "closure": lambda own: lambda *x: own(*x, is_causal=True),
}
"""Calls of PyTorch's own function through an object that holds it."""


def held_by(holder: str) -> Callable[..., Tensor]:
    gc.collect()  # of agents that other tests dropped, or it is ours that is held
    return HOLDERS[holder](F.scaled_dot_product_attention)


ALL_ATTENTION_FUNCTIONS = {"sdpa": attend}
WAYS = [through_a_namespace, through_a_class, through_a_dataclass, through_a_registry]


class Reached(CausalSelfAttention):
    """As nanochat's: its code does not show which function it calls."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__(16, 2)
        self.way = way

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.way(query, key, value)


class Mixing(nn.Module):
    """The same under names that say nothing: `h` heads."""

    def __init__(self, way: Callable[..., Tensor] = attend) -> None:
        super().__init__()
        self.h, self.way = 2, way
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.way(query, key, value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("way", WAYS)
def test_attention_that_is_reached_through_an_object_is_watched(way: Callable[..., Tensor], attention: Any) -> None:
    agent, listener = watch(tiny_gpt(Reached(way), Reached(way)), steps=1, attention=attention, probe_rows=999)
    assert rows_of(listener) == [24] * 4
    assert "watched 2 of 2 attention layers" in agent.report()
    agent, listener = watch(tiny_gpt(Mixing(way), Mixing(way)), attention=attention, probe_rows=999)
    assert rows_of(listener) == [24] * 4
    assert "watched 2 of 2 attention layers" in agent.report()


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_attention_that_is_reached_through_an_object_is_watched_in_compiled_code(way: Callable[..., Tensor]) -> None:
    model = tiny_gpt(Reached(way), Reached(way))
    listener = Listener()
    with attach(model, **{**EVERY_STEP, "attention": "keep", "probe_rows": 999}) as agent:
        agent.subscribe(listener)
        compiled: Any = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            agent.step(train_step(compiled, optimizer, step))
    assert rows_of(listener) == [48] * 4


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_pytorchs_function_in_an_object_from_before_attach_is_watched(holder: str, compiled: bool) -> None:
    model, listener = tiny_gpt(Reached(held_by(holder))), Listener()
    with attach(model, **{**EVERY_STEP, "attention": "keep", "probe_rows": 999}) as agent:
        agent.subscribe(listener)
        called: Any = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            agent.step(train_step(called, optimizer, step))
    assert rows_of(listener) == [48] * 2


SAVED = {torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten.mm.default}


class Policy(nn.Module):
    """As OLMo-core's Transformer: operators of attention stand in a method that no forward reaches."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_gpt(Mixing(), CausalSelfAttention(16, 2))

    def apply_activation_checkpointing(self) -> set[Any]:
        return SAVED | {F.scaled_dot_product_attention}

    def forward(self, words: Tensor) -> Tensor:
        return self.model(words)  # type: ignore[no-any-return]


def test_names_in_code_that_does_not_run_count_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
        listener = Listener()
        agent.subscribe(listener)
        for step in range(3):
            agent.step(train_step(model, optimizer, step))
        report = agent.report()
    assert [layer.name for layer in listener.of(wire.Started)[0].layers] == ["model.blocks.0", "model.blocks.1"]
    assert "watched 2 of 2 attention layers" in report
    assert not caplog.records


def test_a_part_that_looks_like_attention_and_computes_none_is_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    class Gate(nn.Module):
        """As a state-space model's: heads and a projection, and no attention."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.in_proj = 2, nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            gated: Tensor = x * self.in_proj(x).sigmoid()
            return gated

    with caplog.at_level(logging.WARNING, "foreshock"):
        agent, listener = watch(tiny_gpt(Gate(), CausalSelfAttention(16, 2)))
    assert rows_of(listener) == [48] * 2
    assert list(agent.modes()) == [(0, 0), (0, 1)]
    assert agent.report().endswith("watched 1 of 1 attention layers")
    assert not caplog.records


def test_what_was_asked_before_the_first_step_holds_for_the_layers_that_it_shows() -> None:
    def saved() -> dict[str, Any]:
        model = tiny_gpt(Mixing(), CausalSelfAttention(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, **EVERY_STEP) as agent:
            for step in range(3):
                agent.step(train_step(model, optimizer, step))
            agent.set_mode([(0, 1)], "exact_delta", reason="test")
            return agent.state_dict()

    state = saved()
    for blocks, heads in (((Mixing(), CausalSelfAttention(16, 2)), (0, 1)), ((Mixing(), Mixing()), (0, 1))):
        model = tiny_gpt(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, **EVERY_STEP) as agent:
            agent.load_state_dict(state)
            for step in range(3):
                agent.step(train_step(model, optimizer, step))
            assert agent.current_step == 6
            assert {head for head, mode in agent.modes().items() if mode != "plain"} == {heads}
    model = tiny_gpt(Mixing(), CausalSelfAttention(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, **EVERY_STEP) as agent:
        agent.set_mode([(0, 1)], "exact_delta", reason="the only layer that is known before the first step")
        agent.step(train_step(model, optimizer, 0))
        assert [head for head, mode in agent.modes().items() if mode != "plain"] == [(1, 1)]


class Kernel(nn.Module):
    """As OLMo-core's backend: it calls attention for the module round it, and has a number of heads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = 2, 8

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Projected(nn.Module):
    """Its projections bear these names."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.names = 2, 8, names
        for name in (*names, "w_out"):
            setattr(self, name, nn.Linear(16, 16))
        self.backend = Kernel()

    def forward(self, x: Tensor) -> Tensor:
        parts = (getattr(self, name)(x).unflatten(-1, (2, 8)).transpose(1, 2) for name in self.names)
        out: Any = self.w_out
        return out(self.backend(*parts).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [("w_q", "w_k", "w_v"), ("c_q", "c_k", "c_v"), ("ask", "offer", "hand_over")])
def test_norms_of_projections_round_an_inner_module_are_measured_whatever_their_names_are(
    names: tuple[str, str, str],
) -> None:
    model = tiny_gpt(Projected(names))
    _, listener = watch(model, steps=1, norms_every_steps=1, attention="keep")
    layer: Any = model.blocks[0]
    (sample,) = (sample for sample in listener.of(wire.Sample) if sample.query_norm is not None)
    assert len(listener.of(wire.Started)[0].layers) == 1
    for name, measured in zip(names, (sample.query_norm, sample.key_norm), strict=False):
        rows = getattr(layer, name).weight.detach().double().unflatten(0, (2, 8))
        assert measured is not None
        assert torch.as_tensor(measured.numpy()).double() == pytest.approx(torch.linalg.matrix_norm(rows, 2), rel=0.01)


def test_a_foreign_table_that_is_named_as_that_of_transformers_needs_no_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nanotron's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    agent, listener = watch(tiny_gpt(Reached(lambda *operands: ALL_ATTENTION_FUNCTIONS["sdpa"](*operands))), steps=1)
    assert rows_of(listener) == [24] * 2
    assert agent.report().endswith("watched 1 of 1 attention layers")


def test_an_agent_that_found_its_layers_in_the_first_step_leaves_with_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_gpt(Mixing(), Mixing())
    before = [sorted(vars(module)) for module in model.modules()]
    agent = attach(model, **{**EVERY_STEP, "quiet": False, "spool_directory": None})
    agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    printed = capsys.readouterr().err
    assert printed.index("Drift by rounding: not in this run") < printed.index("2 x blocks.0, blocks.1")
    detach(model)
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert agent.modes() == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], "plain")


def test_shapes_without_numbers_are_no_calls(caplog: pytest.LogCaptureFixture) -> None:
    """As litgpt, which counts the operations of a copy on the meta device before its first step."""
    with torch.device("meta"):
        shapes = tiny_gpt()
    model = tiny_gpt()
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(shapes(tiny_models.batch(0).to("meta")).sum())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            agent.step(train_step(model, optimizer, step))
    assert not caplog.records


@pytest.mark.promise("A14")
@pytest.mark.parametrize("kind", [Mixing, lambda: Reached(through_a_namespace)])
def test_a_training_whose_layers_the_first_step_shows_is_equal_to_the_bit(kind: Callable[[], nn.Module]) -> None:
    def course(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = tiny_gpt(kind(), kind())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        agent = attach(model, **{**EVERY_STEP, "attention": "keep"}) if watched else None
        for step in range(4):
            loss = train_step(model, optimizer, step)
            if agent is not None:
                agent.step(loss)
        if agent is not None:
            agent.close()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, course(watched=True), course(watched=False)))
