"""What the agent costs the training thread, by kind of step: `python -P -m foreshock.benchmarks.agent_cost`.

A model of 12 layers x 12 heads (GPT-2 small's count) with a service address at which nobody listens, so that sender,
spool and retries are all at work. Nothing trains: each step's counts are written into the layers' state, as a
backward would, outside the timed call. Times are processor time of the training thread, so that a busy machine does not
count; `wall` stands beside them. Spectral norms are left out: they are products of weights on the training device.
"""

import argparse
import socket
import tempfile
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SLOT_COUNT, SUM_SLOTS, Slot
from foreshock.contract.wire import Command
from foreshock.monitor import attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE
from foreshock.monitor.switching import AT_ONCE

LAYERS, HEADS, ROWS = 12, 12, 32 * 1024
WARM_UP = 100
"""Steps that start threads and fill caches, and are not counted."""


class Attention(nn.Module):
    """Announces its heads; what it computes does not matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, 64

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def counts(generator: np.random.Generator) -> Tensor:
    """A healthy step's state of one layer, int64 [HEADS, SLOT_COUNT]."""
    words = np.zeros((HEADS, SLOT_COUNT), dtype=np.int64)
    floats = words.view(np.float64)
    words[:, list(COUNT_SLOTS)] = generator.integers(0, 50, (HEADS, len(COUNT_SLOTS)))
    words[:, [Slot.NONFINITE_ROWS, Slot.EMPTY_ROWS]] = 0
    words[:, Slot.ROWS] = ROWS
    floats[:, list(SUM_SLOTS)] = generator.normal(ROWS, 10.0, (HEADS, len(SUM_SLOTS)))
    floats[:, list(MAX_SLOTS)] = generator.normal(20.0, 1.0, (HEADS, len(MAX_SLOTS)))
    return torch.from_numpy(words)


@dataclass(slots=True)
class Timings:
    """Seconds of each call, by processor and by wall clock."""

    processor: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Median, 99th percentile and longest in microseconds."""
        parts = (np.percentile(seconds, (50, 99, 100)) * 1e6 for seconds in (self.processor, self.wall))
        figures = [f"{figure:8.0f}" for part in parts for figure in part]
        return " ".join([f"{len(self.wall):6d}", *figures])


def measure(steps: int, *, orders: int, listening: bool, pause_seconds: float) -> dict[str, Timings]:
    """Timings by kind of step: plain, with a sample, all of those, and after them the steps that carry out orders.

    orders: that one acknowledgement brings, each of which switches every head.
    """
    generator = np.random.default_rng(0)
    model = nn.Sequential(*(Attention() for _ in range(LAYERS)))
    kinds = {name: Timings() for name in ("plain step", "step with a sample", "all steps", "step with orders")}
    modes = ("exact_delta", "row_corrected")
    with socket.create_server(("127.0.0.1", 0)) as unused, tempfile.TemporaryDirectory() as spool:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        agent = attach(model, run="cost", url=url, spool_directory=spool, sample_every_seconds=0.0, quiet=True)
        states = [getattr(module, LAYER_ATTRIBUTE).state for module in model]
        if listening:
            agent.subscribe(lambda event: None)
        prepared = [counts(generator) for _ in range(64)]
        for step in range(1, steps + 1 + -(-orders // AT_ONCE)):
            if step == steps + 1 and agent._outbox.sender is not None:
                every = [
                    Command(id=f"c{n}", mode=modes[n % 2], reason="a benchmark", issued_by="it") for n in range(orders)
                ]
                agent._outbox.sender._commands.extend(every)
            for layer, state in enumerate(states):
                state.copy_(prepared[(step + 5 * layer) % len(prepared)])
            wall, processor = time.perf_counter(), time.thread_time()
            agent.step(2.0, grad_norm=1.0, learning_rate=1e-3)
            took = time.thread_time() - processor, time.perf_counter() - wall
            if pause_seconds:
                time.sleep(pause_seconds)
            if step <= WARM_UP:
                continue
            kind = "step with a sample" if agent._sampler.collector.since_step == step else "plain step"
            for name in (kind, "all steps") if step <= steps else ("step with orders",):
                kinds[name].processor.append(took[0])
                kinds[name].wall.append(took[1])
        agent.close()
    return kinds


def main() -> None:
    """Print one table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=8000)
    options.add_argument("--orders", type=int, default=256, help="switches of every head in one acknowledgement")
    options.add_argument("--pause", type=float, default=0.0, help="seconds between steps, in which the sender may run")
    options.add_argument("--listening", action="store_true", help="with a subscriber, who gets each event at once")
    chosen = options.parse_args()
    measured = measure(chosen.steps, orders=chosen.orders, listening=chosen.listening, pause_seconds=chosen.pause)
    print("microseconds        steps   median      p99  longest  w.median    w.p99  w.longest (w.: by wall clock)")
    for name, timings in measured.items():
        if timings.wall:
            print(f"{name:18s} {timings.line()}")


if __name__ == "__main__":
    main()
