"""What the agent does at each step boundary: samples tile the steps, and a layer that stops counting is named."""

import logging
from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import (
    tiny_gpt,
    train_step,
)
from tests.monitor.watching import rows_of, watch

from foreshock.contract import wire
from foreshock.monitor import attach


def test_every_row_of_every_head_is_counted_and_samples_tile_the_steps() -> None:
    _, listener = watch(tiny_gpt(), steps=3)
    samples = listener.of(wire.Sample)
    assert [(s.since_step, s.step) for s in samples] == [(0, 1), (1, 2), (2, 3)]
    assert rows_of(listener) == [3 * 2 * 12] * 4
    assert [type(e) for e in listener.events[:1] + listener.events[-1:]] == [wire.Started, wire.Finished]


def test_the_loss_of_each_sample_is_the_mean_of_its_steps() -> None:
    model, losses = tiny_gpt(), []
    agent = attach(model, **{**EVERY_STEP, "sample_every_steps": 4})
    listener = Listener()
    agent.subscribe(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        losses.append(train_step(model, optimizer, step))
        agent.step(losses[-1], grad_norm=float(step), learning_rate=0.1)
    agent.close()
    first, second = listener.of(wire.Sample)
    assert first.loss == pytest.approx(losses[0].item(), rel=1e-6)
    assert second.loss == pytest.approx(torch.stack(losses[1:]).double().mean().item(), rel=1e-6)
    assert second.loss_max == pytest.approx(max(x.item() for x in losses[1:]), rel=1e-6)
    assert (second.grad_norm, second.learning_rate) == (3.0, 0.1)


def test_a_layer_that_stops_counting_is_named_when_it_does_and_again_when_it_does_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    with agent, caplog.at_level(logging.WARNING, "foreshock"):
        for step, frozen in enumerate([False, False, True, True, False, True, False]):
            second: Any = model.blocks[1]
            second.core = (lambda q, k, v: v) if frozen else type(second).core.__get__(second)
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
    told = [r.message for r in caplog.records if "counted nothing" in r.message]
    assert [t.split(" in ")[1].split(":")[0] for t in told] == ["step 3", "step 6"]
    assert all("layer 1 (blocks.1)" in t for t in told)
