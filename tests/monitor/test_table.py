"""The table that attaching prints: what was found, what is not watched, and what is after the first steps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_refused_modes import half_masked
from tests.monitor.tiny_models import (
    AttentionWithMask,
    CausalSelfAttention,
    tiny_gpt,
    train_step,
)
from tests.monitor.unusual_attention import ByHand
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.outbox import Outbox


def test_like_layers_share_a_line_of_the_table_and_unlike_ones_do_not() -> None:
    alike = [CausalSelfAttention(16, 2) for _ in range(9)]

    def reported(*attention: nn.Module) -> list[str]:
        model = tiny_gpt(*attention)
        with attach(model, **EVERY_STEP) as agent:
            for step in range(2):
                agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
        return [" ".join(line.split()) for line in agent.report().splitlines()]

    lines = reported(*alike[:3], CausalSelfAttention(16, 4), *alike[3:], ByHand(), ByHand())
    assert [line.split(" fused")[0] for line in lines if "blocks" in line][:2] == [
        "0, 1, ..., 9 9 x blocks.0, blocks.1, ..., blocks.9 2 2 8",
        "3 blocks.3 4 4 4",
    ]
    by_hand = "2 x not monitored: it computes its attention by hand (blocks.10, blocks.11)"
    assert [line for line in lines if "not monitored" in line] == [by_hand]
    assert any(line.startswith("0 to 8 9 x blocks.0, blocks.1, ..., blocks.8") for line in reported(*alike))


class KeysOfAFunction(nn.Module):
    """Three query heads share the one key head that no projection makes."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q_proj(x).unflatten(2, (3, 4)).transpose(1, 2)
        keys = x[:, None, :, :4]
        return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True).transpose(1, 2).flatten(2)


def test_key_heads_that_nothing_tells_are_no_number_in_the_table_and_the_service_is_told_so() -> None:
    """The heads were told by whoever attached; they say nothing of keys."""
    model = nn.Sequential(KeysOfAFunction(), nn.Linear(12, 2))
    listener = Listener()
    with attach(model, **EVERY_STEP, heads={"0": 3}) as agent:
        agent.subscribe(listener)
        for _ in range(2):
            loss = model(torch.randn(2, 5, 12)).square().mean()
            torch.autograd.backward(loss)
            agent.step(float(loss.detach()))
        report = agent.report()
    (line,) = [" ".join(line.split()) for line in report.splitlines() if line.startswith("0 ")]
    assert line.startswith("0 0 3 ? 4 norms are not measured: W_Q and W_K were not found")
    assert "watched 1 of 1 attention layers" in report
    assert "in no known order do the outputs of its projections (q_proj) give its keys, 1 heads of 4" in report
    (started,) = listener.of(wire.Started)
    assert [layer.kv_heads_known for layer in started.layers] == [False]
    samples = listener.of(wire.Sample)
    assert samples
    assert all(each is None for sample in samples for each in (sample.key_norm, sample.query_key_norm))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_service_is_corrected_about_a_layer_that_is_switched_refused_and_switched_back(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[tuple[str, bool]]] = []

    def correct(outbox: Outbox, started: wire.Started) -> None:
        outbox.started = started
        told.append([(layer.served_by, layer.sampled) for layer in started.layers])

    monkeypatch.setattr(Outbox, "correct", correct)
    probe, ours = ("probe", True), ("reference", False)

    def step(model: nn.Module, agent: Agent) -> None:
        running: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        agent.step(train_step(running, torch.optim.SGD(model.parameters(), lr=0.1), agent.current_step))

    half = half_masked()
    first: Any = half.blocks[0]
    with attach(half, **EVERY_STEP) as agent:
        for masks in (False, True, True):
            first.masks = masks
            step(half, agent)
    assert told == [[probe, ours]]
    told.clear()
    model = tiny_gpt()
    with attach(model, **{**EVERY_STEP, "attention": "keep"}) as agent:
        for mode in (None, "row_corrected", None, "plain", None):
            if mode is not None:
                agent.set_mode([(0, 0)], mode, "a test")
            step(model, agent)
    assert told == [[ours, probe], [probe, probe]]
    torch._dynamo.reset()


def test_the_table_after_the_first_steps_tells_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    masked = tiny_gpt(AttentionWithMask(16, 2), CausalSelfAttention(16, 2), ByHand())
    with attach(masked, **{**EVERY_STEP, "quiet": False}) as agent:
        assert capsys.readouterr().err == "", "no step has shown yet what is attention"
        for step in range(2):
            agent.step(train_step(masked, torch.optim.SGD(masked.parameters(), lr=0.1), step))
        told = capsys.readouterr().err
        assert "1 x kernels, but native and sampled in calls where it passes a mask (blocks.0)" in told
        assert "1 x kernels (blocks.1)" in told
        assert told.rstrip().endswith("watched 2 of 3 attention layers")
        assert agent.report().count("watched 2 of 3 attention layers") == 1
