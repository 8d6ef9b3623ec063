"""The host cost of an unavailable service: two trainings alternate, one without a service and one with it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.faults.hostile_server import answer, closed_port, drip, hang, hostile_server
from tests.faults.sending import BUSY_SECONDS
from torch import Tensor, nn
from torch.nn import functional as F

from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SLOT_COUNT, SUM_SLOTS, Slot
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE

LAYERS, HEADS, ROWS = 12, 12, 32 * 1024
BLOCK = 50
"""Steps of one training before the other continues."""
PROFILED_BLOCKS = 9
MAX_EXTRA_CALLS = 50
"""Limit of additional calls per step. A batch adds 18 to the 520 of a sampled step; a call per head would add 144."""
WARM_UP_BLOCKS = 4
"""Afterwards the detectors' arrays, the threads and their arenas exist in both trainings."""


CHILD = """
import json, sys
from pathlib import Path
from tests.faults.test_host_cost import measure
print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
"""


class Attention(nn.Module):
    """Has the head attributes that foreshock reads; its result does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, 64

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def healthy_state(generator: np.random.Generator) -> Tensor:
    """The state of one layer after a healthy step, int64 [HEADS, SLOT_COUNT]."""
    words = np.zeros((HEADS, SLOT_COUNT), dtype=np.int64)
    floats = words.view(np.float64)
    words[:, list(COUNT_SLOTS)] = generator.integers(0, 50, (HEADS, len(COUNT_SLOTS)))
    findings = Slot.NONFINITE_ROWS, Slot.EMPTY_ROWS, Slot.WRONG_ROWS, Slot.WRONG_GRADIENT_ROWS
    words[:, list(findings)] = 0  # a nonzero count would sample every step
    words[:, Slot.ROWS] = ROWS
    floats[:, list(SUM_SLOTS)] = generator.normal(ROWS, 10.0, (HEADS, len(SUM_SLOTS)))
    floats[:, list(MAX_SLOTS)] = generator.normal(20.0, 1.0, (HEADS, len(MAX_SLOTS)))
    return torch.from_numpy(words)


@contextmanager
def service_with(problem: str) -> Iterator[str]:
    """The address of a service that is down, hangs, sends byte by byte or replies with garbage."""
    behaviours: dict[str, Any] = {"slow": hang, "dripping": drip, "garbage": answer(200, body=b"<html>" * 1000)}
    if problem == "down":
        yield closed_port()
    else:
        with hostile_server(behaviours[problem]) as server:
            yield server.url


class Training:
    """Steps of a few milliseconds; every tenth is sampled, the highest default rate."""

    def __init__(self, url: str | None, spool: Path) -> None:
        model = nn.Sequential(*(Attention() for _ in range(LAYERS)))
        self.agent: Agent = attach(
            model, run="a-run", url=url, spool_directory=spool, sample_every_steps=10, quiet=True
        )
        self.states = [getattr(module, LAYER_ATTRIBUTE).state for module in model]
        self.layer_states = [healthy_state(np.random.default_rng(seed)) for seed in range(8)]
        self.longest_step = 0.0
        self.host_calls: list[int] = []

    def block(self, *, profiled: bool = False) -> None:
        """Run steps: write the state that a backward pass would leave, then step the agent, optionally profiled."""
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for number in range(BLOCK):
            for state in self.states:
                state.copy_(self.layer_states[number % len(self.layer_states)])
            calls, began = 0, time.monotonic()
            sys.setprofile(count if profiled else None)
            self.agent.step(2.0, grad_norm=1.0, learning_rate=1e-3)
            sys.setprofile(None)
            self.longest_step = max(self.longest_step, time.monotonic() - began)
            self.host_calls += [calls] * profiled

    def most_expensive_step(self) -> float:
        """Function calls of the most expensive step of a block: the maximum over steps of the median over blocks.
        Every block samples at the same steps."""
        return float(np.median(np.reshape(self.host_calls, (-1, BLOCK)), axis=0).max())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(problem: str, folder: Path, blocks: int) -> dict[str, float]:
    """Run both trainings alternately. Needs its own process, because other work would affect the memory figures."""
    with service_with(problem) as url:
        baseline, affected = Training(None, folder), Training(url, folder)
        for training in (baseline, affected):
            for _ in range(WARM_UP_BLOCKS):
                training.block()
        before = resident_bytes()
        for _ in range(blocks):
            baseline.block()
            affected.block()
        memory_growth = (resident_bytes() - before) / 2**20
        for _ in range(PROFILED_BLOCKS):
            baseline.block(profiled=True)
            affected.block(profiled=True)
        began = time.monotonic()
        affected.agent.close()
        close_seconds = time.monotonic() - began
        baseline.agent.close()
    return {
        "calls of the most expensive step": affected.most_expensive_step(),
        "calls of the most expensive step without a service": baseline.most_expensive_step(),
        "longest step, s": round(affected.longest_step, 2),
        "memory grown, MiB": round(memory_growth, 1),
        "close, s": round(close_seconds, 2),
    }


@pytest.mark.full
@pytest.mark.promise("A1")
@pytest.mark.parametrize("problem", ["down", "slow", "dripping", "garbage"])
def test_unavailable_service_adds_negligible_cost_to_a_step(
    problem: str, tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    assert LAYERS * HEADS == 144
    blocks = sizes("host_steps", quick=600, long=5000) // BLOCK
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, problem, str(tmp_path), str(blocks)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    for name, value in figures.items():
        record_property(f"{problem}: {name}", value)
    assert figures["memory grown, MiB"] < 16
    assert figures["close, s"] < 2.0 + BUSY_SECONDS
    calls = figures["calls of the most expensive step"], figures["calls of the most expensive step without a service"]
    assert calls[0] - calls[1] < MAX_EXTRA_CALLS
    assert figures["longest step, s"] < BUSY_SECONDS  # a step must not wait for the service
