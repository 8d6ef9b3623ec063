"""Attention under names that nobody expects is watched, with what the model, the user or the call tells."""

from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.unusual_attention import (
    HEADS,
    WIDTH,
    ByHand,
    Convolutions,
    Gated,
    NobodyTellsHeads,
    NonLocalBlock,
    OfARegistry,
    ParameterBank,
    Pattern,
    PyTorchsOfATuple,
    ReversedProducts,
    Router,
    Scaled,
    TwoStreams,
    UnevenKeys,
)
from torch import nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach


def one_step(model: nn.Module, steps: int = 1, **options: Any) -> tuple[wire.Started, list[int], str]:
    """What the service was told first, the rows of each head, and the report."""
    listener = Listener()
    with attach(model, **{**EVERY_STEP, "attention": "keep", "probe_rows": 999, **options}) as agent:
        agent.subscribe(listener)
        for _ in range(steps):
            torch.autograd.backward(model(torch.randn(3, 6, WIDTH)).square().sum())
            agent.step(1.0)
    [started] = listener.of(wire.Started)
    return started, slot_values(listener.of(wire.Sample)[0].words(), Slot.ROWS).astype(int).tolist(), agent.report()


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
@pytest.mark.parametrize("kind", [ByHand, NonLocalBlock, Gated, ReversedProducts])
def test_attention_by_hand_is_named_whatever_its_names_are(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    told = told_of(kind, caplog)
    assert told.count("the attention of 1 is not watched: it computes its attention by hand") == 1
    assert "1 x not monitored: it computes its attention by hand (1)" in told
    assert told.endswith("watched 1 of 2 attention layers")


@pytest.mark.promise("A24")
def test_pytorchs_function_that_a_tuple_keeps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    told = told_of(PyTorchsOfATuple, caplog)
    assert "the attention of 1 is not watched: it calls PyTorch's attention where it cannot be met" in told
    assert told.endswith("watched 1 of 2 attention layers")


@pytest.mark.promise("A24")
@pytest.mark.parametrize("kind", [OfARegistry, Scaled])
def test_attention_of_a_registered_function_or_of_a_base_called_by_name_is_watched(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    assert told_of(kind, caplog).endswith("watched 2 of 2 attention layers")


@pytest.mark.promise("A24")
@pytest.mark.parametrize("kind", [Pattern, Router])
def test_a_softmax_over_parameters_is_no_attention(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    told = told_of(kind, caplog)
    assert "not watched" not in told
    assert told.endswith("watched 1 of 1 attention layers")
