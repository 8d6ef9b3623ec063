"""Train a small model under an agent, and what was counted; an attention that tells nobody its heads."""

from typing import Any

import numpy as np
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import (
    train_step,
)
from torch import nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent, attach


def watch(model: nn.Module, steps: int = 2, **overrides: Any) -> tuple[Agent, Listener]:
    """Attach, train, close; returns the agent and everything it said."""
    agent = attach(model, **{**EVERY_STEP, **overrides})
    listener = Listener()
    agent.subscribe(listener)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        agent.step(train_step(model, optimizer, step))
    agent.close()
    return agent, listener


def rows_of(listener: Listener) -> list[int]:
    """Rows counted per head over all samples."""
    return np.sum([slot_values(s.words(), Slot.ROWS) for s in listener.of(wire.Sample)], axis=0).astype(int).tolist()  # type: ignore[no-any-return]
