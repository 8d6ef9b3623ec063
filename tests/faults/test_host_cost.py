"""What a service in trouble costs the training: two trainings take turns, one of them with such a service."""

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
"""Steps of one training before it is the other's turn."""
COUNTED_BLOCKS = 9
MORE_CALLS = 50
"""What a batch for the service adds to a sampled step: 18 of 520; one more for each head would be 144."""
WARM_UP_BLOCKS = 4
"""Arrays of the detectors, threads and their arenas are there then, with a service in trouble or without."""


CHILD = """
import json, sys
from pathlib import Path
from tests.faults.test_host_cost import measured
print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
"""


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
    findings = Slot.NONFINITE_ROWS, Slot.EMPTY_ROWS, Slot.WRONG_ROWS, Slot.WRONG_GRADIENT_ROWS
    words[:, list(findings)] = 0  # with one, every step is sampled
    words[:, Slot.ROWS] = ROWS
    floats[:, list(SUM_SLOTS)] = generator.normal(ROWS, 10.0, (HEADS, len(SUM_SLOTS)))
    floats[:, list(MAX_SLOTS)] = generator.normal(20.0, 1.0, (HEADS, len(MAX_SLOTS)))
    return torch.from_numpy(words)


@contextmanager
def service_in(trouble: str) -> Iterator[str]:
    """The address of a service that is down, slow, drips its answer or answers garbage."""
    behaviours: dict[str, Any] = {"slow": hang, "dripping": drip, "garbage": answer(200, body=b"<html>" * 1000)}
    if trouble == "down":
        yield closed_port()
    else:
        with hostile_server(behaviours[trouble]) as server:
            yield server.url


class Training:
    """Steps of a few milliseconds; a sample on every tenth, the most there can be by default."""

    def __init__(self, url: str | None, spool: Path) -> None:
        model = nn.Sequential(*(Attention() for _ in range(LAYERS)))
        self.agent: Agent = attach(
            model, run="a-run", url=url, spool_directory=spool, sample_every_steps=10, quiet=True
        )
        self.states = [getattr(module, LAYER_ATTRIBUTE).state for module in model]
        self.counted = [counts(np.random.default_rng(seed)) for seed in range(8)]
        self.longest_step = 0.0
        self.host_calls: list[int] = []

    def block(self, *, counted: bool = False) -> None:
        """Some steps: the counts that a backward would leave, and the agent, whose calls may be counted."""
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for number in range(BLOCK):
            for state in self.states:
                state.copy_(self.counted[number % len(self.counted)])
            calls, began = 0, time.monotonic()
            sys.setprofile(count if counted else None)
            self.agent.step(2.0, grad_norm=1.0, learning_rate=1e-3)
            sys.setprofile(None)
            self.longest_step = max(self.longest_step, time.monotonic() - began)
            self.host_calls += [calls] * counted

    def dearest_step(self) -> float:
        """The agent's calls at the dearest place of a block, at the median of all blocks: samples come at the same
        places of each."""
        return float(np.median(np.reshape(self.host_calls, (-1, BLOCK)), axis=0).max())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(trouble: str, folder: Path, blocks: int) -> dict[str, float]:
    """Both trainings, turn by turn. For a process of its own: what else it did would show in its memory."""
    with service_in(trouble) as url:
        quiet, troubled = Training(None, folder), Training(url, folder)
        for training in (quiet, troubled):
            for _ in range(WARM_UP_BLOCKS):
                training.block()
        before = resident_bytes()
        for _ in range(blocks):
            quiet.block()
            troubled.block()
        grown = (resident_bytes() - before) / 2**20
        for _ in range(COUNTED_BLOCKS):
            quiet.block(counted=True)
            troubled.block(counted=True)
        began = time.monotonic()
        troubled.agent.close()
        leaving = time.monotonic() - began
        quiet.agent.close()
    return {
        "calls of the agent's dearest step": troubled.dearest_step(),
        "calls of the same without a service": quiet.dearest_step(),
        "longest step, s": round(troubled.longest_step, 2),
        "memory grown, MiB": round(grown, 1),
        "close, s": round(leaving, 2),
    }


@pytest.mark.full
@pytest.mark.promise("A1")
@pytest.mark.parametrize("trouble", ["down", "slow", "dripping", "garbage"])
def test_a_service_in_trouble_costs_a_step_next_to_nothing(
    trouble: str, tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    assert LAYERS * HEADS == 144
    blocks = sizes("host_steps", quick=600, long=5000) // BLOCK
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, trouble, str(tmp_path), str(blocks)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    for name, value in figures.items():
        record_property(f"{trouble}: {name}", value)
    assert figures["memory grown, MiB"] < 16
    assert figures["close, s"] < 2.0 + BUSY_SECONDS
    calls = figures["calls of the agent's dearest step"], figures["calls of the same without a service"]
    assert calls[0] - calls[1] < MORE_CALLS
    assert figures["longest step, s"] < BUSY_SECONDS  # no step waits for the service
