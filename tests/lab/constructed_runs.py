"""Constructed runs with a known outcome."""

from pathlib import Path
from typing import Any

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words, identity_row
from foreshock.lab.recording.trace import Steps
from foreshock.lab.recording.trace_writer import TraceWriter

HEADS = 4
STEPS = 6000


def steps(loss: Floats, grad_norm: Floats | None = None) -> Steps:
    norm = np.full(len(loss), 0.5) if grad_norm is None else grad_norm
    step = np.arange(1, len(loss) + 1)
    return Steps(step, loss, norm, np.ones(len(loss), dtype=np.int64))


def noisy(level: float, count: int = STEPS, seed: int = 0) -> Floats:
    return level + 0.02 * np.random.default_rng(seed).normal(size=count)


def words(offset: float, largest: float, bias: float = 1e-4) -> Words:
    state = np.tile(identity_row(), (HEADS, 1))
    floats = state.view(np.float64)
    state[:, Slot.ROWS] = 1000
    floats[:, Slot.SCORE_OFFSET_SUM] = 500.0
    floats[:, Slot.ROW_MAX_ABS] = 12.0
    floats[1, Slot.SCORE_OFFSET_SUM], floats[1, Slot.ROW_MAX_ABS] = 1000 * offset, largest
    floats[:, Slot.DELTA_BIAS_SUM], floats[1, Slot.DELTA_BIAS_SUM] = 1e-6, bias
    return state


def record(
    path: Path, *, fails: bool, split: str = "held-out", seed: int = 1, bias: float = 1e-4, **header: Any
) -> Path:
    """A run of two layers of two heads; a failing head doubles every 400 steps, and the loss rises at step 5000."""
    layers = tuple(
        wire.Layer(layer=layer, name=f"h.{layer}", heads=(0, 1), kv_heads=2, head_dim=8, served_by="reference")
        for layer in (0, 1)
    )
    head = {"recipe": "made-up", "arm": "untreated" if fails else "control", "seed": seed, "split": split}
    head |= {"truth": "rounding" if fails else "healthy", "nature": "natural"}
    loss = noisy(2.0, seed=seed)
    if fails:
        loss[5000:] += 0.2
    with TraceWriter(path, head | header) as writer:
        writer(wire.Started(step=0, unix_seconds=0.0, layers=layers, policy="observe", numerics="kernel"))
        for step in range(50, STEPS + 1, 50):
            drift = 0.4 * 2 ** (max(0, step - 1500) / 400) if fails else 0.4
            state = wire.Array.of(words(drift, 10 + drift, bias))
            sample = wire.Sample(step=step, since_step=step - 50, unix_seconds=0.0, states=state, learning_rate=1e-3)
            writer(sample)
            writer.steps(step - 50, loss[step - 50 : step], np.full(50, 0.5))
    return path
