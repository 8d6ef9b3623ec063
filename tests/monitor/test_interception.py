"""PyTorch's own attention function is met while an agent is attached, and given back."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import (
    AttentionByName,
    batch,
    tiny_gpt,
    train_step,
)
from tests.monitor.watching import rows_of, watch

from foreshock.monitor import attach
from foreshock.monitor.attention import interception


def test_a_function_imported_by_name_is_watched_too() -> None:
    _, listener = watch(tiny_gpt(AttentionByName(16, 4)), steps=1)
    assert rows_of(listener) == [24] * 4


def test_calls_outside_every_watched_module_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    x = torch.randn(1, 2, 4, 8)
    F.scaled_dot_product_attention(x, x, x)
    with caplog.at_level(logging.WARNING, "foreshock"):
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    agent.close()
    assert any("outside every watched module" in r.message for r in caplog.records)


def test_calls_outside_that_train_nothing_or_came_before_attach_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    other, model = tiny_gpt(), tiny_gpt(seed=1)
    x = torch.randn(1, 2, 4, 8)
    with attach(other, **EVERY_STEP):
        F.scaled_dot_product_attention(x, x, x)
        with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
            average = copy.deepcopy(model)
            with torch.no_grad():
                average(batch(0))
            with torch.inference_mode():
                average(batch(0))
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    assert "outside every watched module" not in caplog.text


def test_two_models_are_watched_side_by_side() -> None:
    first, second = tiny_gpt(), tiny_gpt(seed=1)
    agents = [attach(m, **EVERY_STEP) for m in (first, second)]
    listeners = [Listener(), Listener()]
    for model, agent, listener in zip((first, second), agents, listeners, strict=True):
        agent.subscribe(listener)
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    agents[0].close()
    assert F.scaled_dot_product_attention is interception.scaled_dot_product_attention
    agents[1].close()
    assert [rows_of(listener) for listener in listeners] == [[24] * 4] * 2
