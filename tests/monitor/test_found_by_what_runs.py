"""What the first step runs decides what is attention, however the call is reached and whatever its names are."""

import logging
import math
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.executions import EVERY_STEP
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt
from tests.monitor.unusual_attention import (
    HEADS,
    WIDTH,
    ByHand,
    Convolutions,
    Flatten,
    Gated,
    Mixing,
    NamedHeadsOfALibrary,
    NobodyTellsHeads,
    OfALibrary,
    ParameterBank,
    Pattern,
    PyTorchsOfARegistry,
    ReversedProducts,
    Router,
    TwoStreams,
    UnevenKeys,
)
from tests.monitor.watching import listening, rows_of, train, watch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.model.discovery import find_attention
from foreshock.monitor.model.executed import BY_HAND, OUT_OF_REACH, attention_in, broken_rows


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.promise("A24")
@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_attention_under_names_that_say_nothing_is_watched(attention: Any) -> None:
    agent, listener = watch(tiny_gpt(Mixing(), Mixing()), attention=attention, probe_rows=999)
    assert rows_of(listener) == [24] * 4
    assert "watched 2 of 2 attention layers" in agent.report()


@pytest.mark.promise("A24")
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


class NamedMixing(Mixing):
    """With a number of heads, but not called attention."""

    num_heads = 2


class AttentionGPT(tiny_models.TinyGPT):
    """A model that is called attention, and has a number of heads."""

    num_heads = 2


@pytest.mark.promise("A24")
def test_blocks_of_a_model_that_is_called_attention_are_its_candidates() -> None:
    class Attention(NamedMixing):
        def __init__(self) -> None:
            super().__init__()
            self.indexer = NamedMixing()

    class AttentionWithNorms(CausalSelfAttention):
        """As StableLM's, with a layer norm of each head's queries and keys."""

        def __init__(self) -> None:
            super().__init__(16, 2)
            self.q_norm, self.k_norm = NamedMixing(), NamedMixing()

    def candidates(model: nn.Module, **heads: int) -> list[str]:
        return [found.name for found in find_attention(model, heads)]

    assert candidates(AttentionGPT(NamedMixing(), NamedMixing())) == ["blocks.0", "blocks.1"]
    assert candidates(AttentionGPT(Attention(), Attention())) == ["blocks.0", "blocks.1"]
    assert candidates(AttentionGPT(AttentionWithNorms())) == ["blocks.0"]
    assert candidates(Attention()) == [""]
    assert candidates(Attention(), indexer=2) == ["indexer"]


@pytest.mark.promise("A24")
def test_layers_that_the_first_step_shows_take_no_number_that_is_given() -> None:
    model = tiny_gpt(CausalSelfAttention(16, 2), Mixing(), CausalSelfAttention(16, 2))
    agent, listener = watch(model, first_layer={"blocks.0": 0, "blocks.2": 1})
    assert [layer.layer for layer in listener.of(wire.Started)[0].layers] == [0, 2, 1]
    assert not agent.faults


@pytest.mark.promise("A24")
def test_a_number_that_two_layers_of_the_first_step_would_have_leaves_the_others_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleList([tiny_gpt(CausalSelfAttention(16, 2), Mixing()), tiny_gpt(CausalSelfAttention(16, 2))])
    model.forward = lambda ids: sum(part(ids) for part in model)
    with listening(model, first_layer={"0": 0, "1": 1}, strict=False) as (agent, listener):
        train(agent, model, 3)
        why = "0.blocks.1 and 1.blocks.0 both have the layer number 1; give every attention module a number of its own"
        assert f"not monitored: {why}" in agent.report()
    assert rows_of(listener) == [72] * 4
    assert not agent.faults
    assert f"the attention of 0.blocks.1 is not watched: {why}" in caplog.text
    with pytest.raises(ValueError, match=why), listening(model, first_layer={"0": 0, "1": 1}) as (agent, _):
        train(agent, model, 1)


@pytest.mark.promise("A24")
def test_what_was_asked_before_the_first_step_holds_for_the_layers_that_it_shows() -> None:
    def after(model: nn.Module, prepare: Callable[[Agent], object], steps: int = 3) -> tuple[Agent, set[Any]]:
        with attach(model, **EVERY_STEP) as agent:
            prepare(agent)
            train(agent, model, steps)
            return agent, {head for head, mode in agent.modes().items() if mode != "plain"}

    def switch(agent: Agent) -> None:
        agent.set_mode([(0, 1)], "exact_delta", reason="the only layer that is known before the first step")

    def unnamed_first() -> nn.Module:
        return tiny_gpt(Mixing(), CausalSelfAttention(16, 2))

    first, switched = after(unnamed_first(), switch, 1)
    assert switched == {(1, 1)}
    saved = first.state_dict()
    for model in (unnamed_first(), tiny_gpt(Mixing(), Mixing())):
        agent, switched = after(model, lambda agent: agent.load_state_dict(saved))
        assert (agent.current_step, switched) == (4, {(1, 1)})


@pytest.mark.promise("A24")
def test_shapes_without_numbers_are_no_calls(caplog: pytest.LogCaptureFixture) -> None:
    """As litgpt, which counts the operations of a copy on the meta device before its first step."""
    with torch.device("meta"):
        shapes = tiny_gpt()
    model = tiny_gpt()
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(shapes(tiny_models.batch(0).to("meta")).sum())
        train(agent, model, 2)
    assert not caplog.records


@pytest.mark.promise("A24")
@pytest.mark.promise("A14")
def test_looking_for_layers_in_the_first_step_changes_no_bit_of_a_training() -> None:
    def weights(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = tiny_gpt(Mixing(), ByHand())
        torch.manual_seed(1)
        with attach(model, **EVERY_STEP | {"attention": "keep"}) if watched else nullcontext(Mock()) as agent:
            train(agent, model, 4)
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, weights(watched=True), weights(watched=False)))


def one_step(model: nn.Module, steps: int = 1, **options: Any) -> tuple[wire.Started, list[int], str]:
    """What the service was told first, the rows of each head, and the report."""
    with listening(model, attention="keep", probe_rows=999, **options) as (agent, listener):
        for _ in range(steps):
            torch.autograd.backward(model(torch.randn(3, 6, WIDTH)).square().sum())
            agent.step(1.0)
    [started] = listener.of(wire.Started)
    return started, counted_rows(listener)[0], agent.report()


@pytest.mark.parametrize("kind", [ParameterBank, TwoStreams, Convolutions, UnevenKeys])
def test_the_first_call_tells_the_head_dim_that_nothing_else_tells(kind: type[nn.Module]) -> None:
    started, rows, report = one_step(kind())
    assert rows == [18] * HEADS
    assert [layer.head_dim for layer in started.layers] == [WIDTH // HEADS]
    assert "norms are not measured" in report
    assert "watched 1 of 1 attention layers" in report


@pytest.mark.promise("A24")
def test_heads_that_only_the_call_tells_are_watched_from_the_second_step_and_from_the_first_if_given() -> None:
    _, rows, report = one_step(NobodyTellsHeads(), steps=2)
    assert rows == [18] * HEADS
    assert report.endswith("watched 1 of 1 attention layers")
    _, rows, _ = one_step(NobodyTellsHeads(), heads={"": HEADS})
    assert rows == [18] * HEADS


OF_A_LIBRARY = "calls tests.monitor.unusual_attention.MHAOfALibrary, which foreshock does not measure"


def told_of(kind: type[nn.Module], caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """What the log and the report say of a model with an attention that is watched and a module of this kind."""
    torch.manual_seed(0)
    model = nn.Sequential(ParameterBank(), kind(), nn.Linear(WIDTH, 1))
    with attach(model, **{**EVERY_STEP, "heads": {"0": HEADS}, **options}) as agent:
        for _ in range(4):
            torch.autograd.backward(model(torch.randn(3, 6, WIDTH)).square().sum())
            agent.step(1.0)
    return caplog.text + agent.report()


@pytest.mark.promise("A24")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "it computes its attention by hand") for kind in (ByHand, Gated, ReversedProducts)),
        (PyTorchsOfARegistry, "it calls PyTorch's attention where it cannot be met"),
        (OfALibrary, f"it {OF_A_LIBRARY}"),
    ],
)
def test_attention_that_is_not_met_is_named_whatever_its_names_are(
    kind: type[nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = told_of(kind, caplog)
    assert told.count(f"the attention of 1 is not watched: {why}") == 1
    assert f"1 x not monitored: {why}" in told
    assert told.endswith("watched 1 of 2 attention layers")


@pytest.mark.promise("A24")
def test_a_candidate_that_calls_a_function_of_a_library_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    told = told_of(NamedHeadsOfALibrary, caplog)
    assert f"not monitored: it {OF_A_LIBRARY}; have it call scaled_dot_product_attention" in told
    assert told.endswith("watched 1 of 2 attention layers")


def stacked(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules, nn.Linear(WIDTH, 1))


def executed(loss: Tensor, model: nn.Module) -> dict[str, str] | None:
    found = attention_in([loss], model)
    return None if found is None else {name: each.how for name, each in found.items()}


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 5, WIDTH)).square().mean()  # type: ignore[no-any-return]


OF_PRODUCTS = (ByHand, Pattern, Gated, Router, ReversedProducts, ParameterBank)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        (OF_PRODUCTS, {**dict.fromkeys("135", BY_HAND), "6": OUT_OF_REACH}),
        ([lambda: nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True)], {"1.self_attn": BY_HAND}),
        ((OfALibrary, Flatten), {"1": OF_A_LIBRARY}),
    ],
    ids=["of products", "of a layer of PyTorch", "of a library"],
)
def test_each_attention_is_found_under_its_module_and_nothing_else_is(
    kinds: Any, found: dict[str, str], autocast: bool
) -> None:
    model = stacked(*(make() for make in kinds))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model)
    assert executed(loss, model) == found


def test_a_backward_through_another_model_or_without_a_graph_tells_nothing() -> None:
    assert executed(loss_of(stacked(ByHand())), stacked(ByHand())) is None
    assert executed(torch.zeros(()), stacked(ByHand())) is None


def masked(model: nn.Module, x: Tensor, mask: Tensor, packs: bool) -> Tensor:
    """The loss of a model whose attention by hand hides keys with -inf; packs: saved tensors are packed."""
    context = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x) if packs else nullcontext()
    with context:
        query, key, value = model[1].projected(model[0](x))  # type: ignore[index]
        weights = (query @ key.mT).masked_fill(mask, -math.inf).softmax(-1)
        return model[2]((weights @ value).transpose(1, 2).flatten(2)).nansum()  # type: ignore[index, no-any-return]


@pytest.mark.parametrize(
    ("hidden", "broken", "packs", "said"),
    [
        (2, False, False, "4 of 10 rows of a head see no key, or hold a score that overflows"),
        (0, True, False, "10 of 10 rows of a head see no key, or hold a score that is not finite"),
        (0, False, False, ""),
        (2, False, True, ""),
    ],
)
def test_rows_that_a_softmax_by_hand_gives_as_nan_are_counted_and_no_gradient_changes(
    hidden: int, broken: bool, packs: bool, said: str
) -> None:
    model, mask = stacked(ByHand()), torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask[:hidden] = True
    x = torch.randn(2, 5, WIDTH)
    x[:, 0] *= math.nan if broken else 1.0
    plain = torch.autograd.grad(masked(model, x, mask, packs), list(model.parameters()), allow_unused=True)
    loss = masked(model, x, mask, packs)
    [found] = (attention_in([loss], model) or {}).values()
    rows, here = broken_rows(found)
    assert said == rows.partition(":")[0]
    assert here == ("overflows" in rows)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


class Told(nn.Module):
    """An attention of which these attributes and projections tell the heads; the call is never made here."""

    def __init__(self, attributes: dict[str, Any], **widths: int) -> None:
        super().__init__()
        vars(self).update(attributes)
        for name, width in widths.items():
            self.add_module(name, nn.Linear(6, width))

    def forward(self, x: Tensor) -> Tensor:
        return attend(x, x, x)


class Deprecated(Told):
    """As in diffusers: the settings of a model are deprecated attributes of the model too."""

    def __getattr__(self, name: str) -> Any:
        if name == "num_heads":
            warnings.warn(f"use config.{name}", FutureWarning, stacklevel=2)
            return 4
        return super().__getattr__(name)


def test_a_deprecated_attribute_of_a_model_is_read_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        (found,) = find_attention(Deprecated({}, qkv=96), {})
    assert found.heads == 4
    assert not shown


def test_groups_of_queries_that_a_configuration_tells_are_key_heads() -> None:
    config = types.SimpleNamespace(n_head=4, n_query_groups=2, head_size=8)  # as litgpt's
    (found,) = find_attention(Told({"config": config}, qkv=(4 + 2 * 2) * 8), {})
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 8)
    assert found.projection is not None
    assert len(found.projection.key.starts) == 2


@pytest.mark.parametrize(
    ("heads", "head_dim", "key_width", "kv_heads"),
    [(6, 5, 10, 2), (6, 5, 5, 1), (4, 7, 28, 4), (6, 5, 12, 0), (6, 5, 20, 0), (6, 5, 60, 0), (6, 5, 3, 0)],
)
def test_the_width_of_a_key_projection_tells_its_key_heads_or_nothing_does(
    heads: int, head_dim: int, key_width: int, kv_heads: int
) -> None:
    module = Told({"heads": heads}, to_q=heads * head_dim, to_k=key_width)
    (found,) = find_attention(module, {})
    assert (found.problem, found.heads, found.kv_heads, found.head_dim) == (None, heads, kv_heads, head_dim)
    assert (found.projection is None) == (kv_heads == 0)
    if found.projection is not None:
        keys = found.projection.key.read().weights
        assert torch.equal(keys, module.get_parameter("to_k.weight").view(kv_heads, head_dim, -1))
