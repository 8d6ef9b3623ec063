"""Discovery of attention by the calls and operations of the first step, independent of names."""

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
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt
from tests.monitor.unusual_attention import (
    HEADS,
    WIDTH,
    Convolutions,
    ExpertRouter,
    Flatten,
    GatedAttention,
    InconsistentKeyHeads,
    LibraryAttention,
    LibraryAttentionWithHeads,
    ManualAttention,
    ParameterBank,
    PrototypeSoftmax,
    RegistrySdpa,
    ReversedProducts,
    TwoStreams,
    UnknownHeads,
    UnrelatedNames,
)
from tests.monitor.watched_training import listening, rows_of, train, watch
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.model.discovery import find_attention
from foreshock.monitor.model.executed import BY_HAND, OUT_OF_REACH, attention_in, broken_rows


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.promise("A24")
@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_attention_with_unrelated_names_is_watched(attention: Any) -> None:
    agent, listener = watch(tiny_gpt(UnrelatedNames(), UnrelatedNames()), attention=attention, probe_rows=999)
    assert rows_of(listener) == [24] * 4
    assert "watched 2 of 2 attention layers" in agent.report()


@pytest.mark.promise("A24")
def test_module_that_looks_like_attention_but_computes_none_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    class Gate(nn.Module):
        """A state-space-like module with heads and a projection, but without attention."""

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


class NamedMixing(UnrelatedNames):
    """Has a number of heads but is not named attention."""

    num_heads = 2


class AttentionGPT(tiny_models.TinyGPT):
    """A model that is named attention and has a number of heads."""

    num_heads = 2


@pytest.mark.promise("A24")
def test_candidates_are_attention_layers_not_their_model_or_parts_with_similar_names() -> None:
    class Attention(NamedMixing):
        def __init__(self) -> None:
            super().__init__()
            self.indexer = NamedMixing()

    class AttentionWithNorms(CausalSelfAttention):
        """Like StableLM's attention, with norms of queries and keys."""

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
def test_layers_found_in_the_first_step_avoid_configured_numbers() -> None:
    model = tiny_gpt(CausalSelfAttention(16, 2), UnrelatedNames(), CausalSelfAttention(16, 2))
    agent, listener = watch(model, first_layer={"blocks.0": 0, "blocks.2": 1})
    assert [layer.layer for layer in listener.of(wire.Started)[0].layers] == [0, 2, 1]
    assert not agent.faults


@pytest.mark.promise("A24")
def test_layer_number_conflict_in_the_first_step_leaves_other_layers_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleList(
        [tiny_gpt(CausalSelfAttention(16, 2), UnrelatedNames()), tiny_gpt(CausalSelfAttention(16, 2))]
    )
    model.forward = lambda ids: sum(part(ids) for part in model)
    with listening(model, first_layer={"0": 0, "1": 1}, strict=False) as (agent, listener):
        train(agent, model, 3)
        reason = (
            "0.blocks.1 and 1.blocks.0 both have the layer number 1; give every attention module a number of its own"
        )
        assert f"not monitored: {reason}" in agent.report()
    assert rows_of(listener) == [72] * 4
    assert not agent.faults
    assert f"the attention of 0.blocks.1 is not watched: {reason}" in caplog.text
    with pytest.raises(ValueError, match=reason), listening(model, first_layer={"0": 0, "1": 1}) as (agent, _):
        train(agent, model, 1)


@pytest.mark.promise("A24")
def test_requests_before_the_first_step_apply_to_layers_found_in_it() -> None:
    def train_after(model: nn.Module, prepare: Callable[[Agent], object], steps: int = 3) -> tuple[Agent, set[Any]]:
        with attach(model, **EVERY_STEP) as agent:
            prepare(agent)
            train(agent, model, steps)
            return agent, {head for head, mode in agent.modes().items() if mode != "plain"}

    def switch(agent: Agent) -> None:
        agent.set_mode([(0, 1)], "exact_delta", reason="the only layer known before the first step")

    def unrelated_names_first() -> nn.Module:
        return tiny_gpt(UnrelatedNames(), CausalSelfAttention(16, 2))

    first, switched = train_after(unrelated_names_first(), switch, 1)
    assert switched == {(1, 1)}
    saved = first.state_dict()
    for model in (unrelated_names_first(), tiny_gpt(UnrelatedNames(), UnrelatedNames())):
        agent, switched = train_after(model, lambda agent: agent.load_state_dict(saved))
        assert (agent.current_step, switched) == (4, {(1, 1)})


@pytest.mark.promise("A24")
def test_calls_on_the_meta_device_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Like litgpt, which counts FLOPs with a copy on the meta device before the first step."""
    with torch.device("meta"):
        shapes = tiny_gpt()
    model = tiny_gpt()
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(shapes(tiny_models.batch(0).to("meta")).sum())
        train(agent, model, 2)
    assert not caplog.records


@pytest.mark.promise("A24")
@pytest.mark.promise("A14")
def test_discovery_in_the_first_step_keeps_training_bit_identical() -> None:
    def weights(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = tiny_gpt(UnrelatedNames(), ManualAttention())
        torch.manual_seed(1)
        with attach(model, **EVERY_STEP | {"attention": "keep"}) if watched else nullcontext(Mock()) as agent:
            train(agent, model, 4)
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, weights(watched=True), weights(watched=False)))


def one_step(model: nn.Module, steps: int = 1, **options: Any) -> tuple[wire.Started, list[int], str]:
    """The started event, the rows of each head, and the report."""
    with listening(model, attention="keep", probe_rows=999, **options) as (agent, listener):
        for _ in range(steps):
            torch.autograd.backward(model(torch.randn(3, 6, WIDTH)).square().sum())
            agent.step(1.0)
    [started] = listener.of(wire.Started)
    return started, counted_rows(listener)[0], agent.report()


@pytest.mark.parametrize("kind", [ParameterBank, TwoStreams, Convolutions, InconsistentKeyHeads])
def test_head_dim_is_taken_from_the_first_call_if_unknown(kind: type[nn.Module]) -> None:
    started, rows, report = one_step(kind())
    assert rows == [18] * HEADS
    assert [layer.head_dim for layer in started.layers] == [WIDTH // HEADS]
    assert "norms are not measured" in report
    assert "watched 1 of 1 attention layers" in report


@pytest.mark.promise("A24")
def test_layer_with_unknown_heads_is_watched_from_step_2_or_1_if_heads_are_given() -> None:
    _, rows, report = one_step(UnknownHeads(), steps=2)
    assert rows == [18] * HEADS
    assert report.endswith("watched 1 of 1 attention layers")
    _, rows, _ = one_step(UnknownHeads(), heads={"": HEADS})
    assert rows == [18] * HEADS


LIBRARY_FUNCTION = "calls tests.monitor.unusual_attention.LibraryMHA, which foreshock does not measure"


def log_and_report(kind: type[nn.Module], caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """The log and the report for a model with a watched attention and a module of this kind."""
    torch.manual_seed(0)
    model = nn.Sequential(ParameterBank(), kind(), nn.Linear(WIDTH, 1))
    with attach(model, **{**EVERY_STEP, "heads": {"0": HEADS}, **options}) as agent:
        for _ in range(4):
            torch.autograd.backward(model(torch.randn(3, 6, WIDTH)).square().sum())
            agent.step(1.0)
    return caplog.text + agent.report()


@pytest.mark.promise("A24")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, "it computes its attention by hand") for kind in (ManualAttention, GatedAttention, ReversedProducts)),
        (RegistrySdpa, "it calls PyTorch's attention where it cannot be met"),
        (LibraryAttention, f"it {LIBRARY_FUNCTION}"),
    ],
)
def test_unreachable_attention_is_reported_with_the_reason(
    kind: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = log_and_report(kind, caplog)
    assert output.count(f"the attention of 1 is not watched: {reason}") == 1
    assert f"1 x not monitored: {reason}" in output
    assert output.endswith("watched 1 of 2 attention layers")


@pytest.mark.promise("A24")
def test_candidate_that_calls_an_unknown_library_function_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    output = log_and_report(LibraryAttentionWithHeads, caplog)
    assert f"not monitored: it {LIBRARY_FUNCTION}; have it call scaled_dot_product_attention" in output
    assert output.endswith("watched 1 of 2 attention layers")


def stacked(*modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules, nn.Linear(WIDTH, 1))


def executed(loss: Tensor, model: nn.Module) -> dict[str, str] | None:
    found = attention_in([loss], model)
    return None if found is None else {name: each.how for name, each in found.items()}


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(2, 5, WIDTH)).square().mean()  # type: ignore[no-any-return]


PRODUCTS = (ManualAttention, PrototypeSoftmax, GatedAttention, ExpertRouter, ReversedProducts, ParameterBank)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        (PRODUCTS, {**dict.fromkeys("135", BY_HAND), "6": OUT_OF_REACH}),
        ([lambda: nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True)], {"1.self_attn": BY_HAND}),
        ((LibraryAttention, Flatten), {"1": LIBRARY_FUNCTION}),
    ],
    ids=["matrix products", "TransformerEncoderLayer", "library"],
)
def test_attention_is_found_under_its_module_and_other_softmaxes_are_not(
    kinds: Any, found: dict[str, str], autocast: bool
) -> None:
    model = stacked(*(make() for make in kinds))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model)
    assert executed(loss, model) == found


def test_backward_of_another_model_or_without_a_graph_finds_nothing() -> None:
    assert executed(loss_of(stacked(ManualAttention())), stacked(ManualAttention())) is None
    assert executed(torch.zeros(()), stacked(ManualAttention())) is None


def masked(model: nn.Module, x: Tensor, mask: Tensor, packs_saved_tensors: bool) -> Tensor:
    """The loss of a model whose manual attention masks keys with -inf. packs_saved_tensors: use saved_tensors_hooks."""
    context = (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x) if packs_saved_tensors else nullcontext()
    )
    with context:
        query, key, value = model[1].projected(model[0](x))  # type: ignore[index]
        weights = (query @ key.mT).masked_fill(mask, -math.inf).softmax(-1)
        return model[2]((weights @ value).transpose(1, 2).flatten(2)).nansum()  # type: ignore[index, no-any-return]


@pytest.mark.parametrize(
    ("hidden", "broken", "packs_saved_tensors", "message"),
    [
        (2, False, False, "4 of 10 rows of a head see no key, or hold a score that overflows"),
        (0, True, False, "10 of 10 rows of a head see no key, or hold a score that is not finite"),
        (0, False, False, ""),
        (2, False, True, ""),
    ],
)
def test_nan_rows_of_a_manual_softmax_are_counted_and_gradients_unchanged(
    hidden: int, broken: bool, packs_saved_tensors: bool, message: str
) -> None:
    model, mask = stacked(ManualAttention()), torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask[:hidden] = True
    x = torch.randn(2, 5, WIDTH)
    x[:, 0] *= math.nan if broken else 1.0
    plain = torch.autograd.grad(
        masked(model, x, mask, packs_saved_tensors), list(model.parameters()), allow_unused=True
    )
    loss = masked(model, x, mask, packs_saved_tensors)
    [found] = (attention_in([loss], model) or {}).values()
    rows, overflows = broken_rows(found)
    assert message == rows.partition(":")[0]
    assert overflows == ("overflows" in rows)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


class Described(nn.Module):
    """An attention with these attributes and projections, which imply its heads; it is never called."""

    def __init__(self, attributes: dict[str, Any], **widths: int) -> None:
        super().__init__()
        vars(self).update(attributes)
        for name, width in widths.items():
            self.add_module(name, nn.Linear(6, width))

    def forward(self, x: Tensor) -> Tensor:
        return attend(x, x, x)


class Deprecated(Described):
    """Like diffusers: settings of the configuration are also deprecated attributes of the model."""

    def __getattr__(self, name: str) -> Any:
        if name == "num_heads":
            warnings.warn(f"use config.{name}", FutureWarning, stacklevel=2)
            return 4
        return super().__getattr__(name)


def test_deprecated_attribute_of_a_model_is_read_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        (found,) = find_attention(Deprecated({}, qkv=96), {})
    assert found.heads == 4
    assert not raised


def test_query_groups_of_a_configuration_are_key_heads() -> None:
    config = types.SimpleNamespace(n_head=4, n_query_groups=2, head_size=8)  # as litgpt's
    (found,) = find_attention(Described({"config": config}, qkv=(4 + 2 * 2) * 8), {})
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 8)
    assert found.projection is not None
    assert len(found.projection.key.starts) == 2


@pytest.mark.parametrize(
    ("heads", "head_dim", "key_width", "kv_heads"),
    [(6, 5, 10, 2), (6, 5, 5, 1), (4, 7, 28, 4), (6, 5, 12, 0), (6, 5, 20, 0), (6, 5, 60, 0), (6, 5, 3, 0)],
)
def test_key_heads_follow_from_the_key_projection_width_or_are_unknown(
    heads: int, head_dim: int, key_width: int, kv_heads: int
) -> None:
    module = Described({"heads": heads}, to_q=heads * head_dim, to_k=key_width)
    (found,) = find_attention(module, {})
    assert (found.problem, found.heads, found.kv_heads, found.head_dim) == (None, heads, kv_heads, head_dim)
    assert (found.projection is None) == (kv_heads == 0)
    if found.projection is not None:
        keys = found.projection.key.read().weights
        assert torch.equal(keys, module.get_parameter("to_k.weight").view(kv_heads, head_dim, -1))
