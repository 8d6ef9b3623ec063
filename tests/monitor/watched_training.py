"""Helpers that train a small model with an agent and return the agent's events and counters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tests.monitor.doubles import Listener
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import train_step
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent, attach


@contextmanager
def listening(model: nn.Module, **settings: Any) -> Iterator[tuple[Agent, Listener]]:
    """An agent and a listener of its events; samples every step unless the settings say otherwise."""
    with attach(model, **{**EVERY_STEP, **settings}) as agent:
        listener = Listener()
        agent.subscribe(listener)
        yield agent, listener


def train(agent: Agent, model: Any, steps: int | Iterable[int], ids: Tensor | None = None) -> list[Tensor]:
    """Train and call the agent after each step; returns the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps) if isinstance(steps, int) else steps:
        losses.append(train_step(model, optimizer, step, ids).detach())
        agent.step(losses[-1])
    return losses


def watch(model: nn.Module, steps: int = 2, **settings: Any) -> tuple[Agent, Listener]:
    """Attach, train and close; returns the agent and a listener with its events."""
    with listening(model, **settings) as (agent, listener):
        train(agent, model, steps)
    return agent, listener


def rows_of(listener: Listener) -> list[int]:
    """Rows counted per head over all samples."""
    return np.sum([slot_values(s.words(), Slot.ROWS) for s in listener.of(wire.Sample)], axis=0).astype(int).tolist()  # type: ignore[no-any-return]
