"""The training process is killed at random moments while a real service receives its batches."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from foreshock.monitor import AgentConfig
from foreshock.server.testing import LiveService

SCRIPT = Path(__file__).parent / "training.py"


class ForkServer:
    """Forks processes of the training script one after another. Each writes its completed steps to a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(SCRIPT)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, url: str, ending: str) -> "TrainingProcess":
        """Start a process and wait until it has made ten steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        steps = self._folder / f"steps-{time.monotonic_ns()}"
        self._process.stdin.write(json.dumps([url, str(self._folder / "spool"), ending, str(steps)]) + "\n")
        self._process.stdin.flush()
        while (line := self._process.stdout.readline().split())[:1] != ["ready"]:
            assert line, "the script has exited"  # skip the "left after" line of an earlier process
        return TrainingProcess(boot=line[1], pid=int(line[2]), steps=steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)


@dataclass(frozen=True)
class TrainingProcess:
    """One process of the training script."""

    boot: str
    pid: int
    steps: Path

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait(20)

    def wait(self, seconds: float) -> None:
        """Wait until the process has exited."""
        deadline = time.monotonic() + seconds
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def steps_before_the_last_batch(self) -> int:
        """The steps that had ended before the sender began to build its last stored batch, which has their samples.

        A step may end while a batch is being built, so only steps before the first one that saw the second-to-last
        batch are counted.
        """
        lines = [list(map(int, line.split())) for line in self.steps.read_text().splitlines()[:-1]]
        return next(step for step, batches in lines if batches >= lines[-1][1] - 1) - 1


def samples(database: Path) -> dict[str, list[tuple[int, int, int]]]:
    """(sequence, since_step, step) of every stored sample, by boot."""
    query = "SELECT boot, sequence, since_step, step FROM samples JOIN boots ON boots.id = boot_id ORDER BY 1, 4"
    found: dict[str, list[tuple[int, int, int]]] = {}
    with closing(sqlite3.connect(database)) as connection:
        for boot, *rest in connection.execute(query):
            found.setdefault(boot, []).append((rest[0], rest[1], rest[2]))
    return found


@pytest.mark.promise("A8")
def test_sigkill_loses_at_most_a_second_and_the_next_start_sends_the_rest_once(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    """During half of the kills the service is unreachable, so the batches wait in the spool for the next start."""
    max_kills, deadline = sizes("agent_kills", quick=2, long=200), sizes.until()
    rng = random.Random(sizes("seed", quick=5, long=5))
    killed: list[TrainingProcess] = []
    with LiveService(tmp_path) as service, ForkServer(tmp_path) as fork_server:
        while not killed or (len(killed) < max_kills and time.monotonic() < deadline):
            process = fork_server.start(service.url if len(killed) % 2 else "http://127.0.0.1:9", "never")
            time.sleep(rng.uniform(0.0, 0.5))
            process.kill()
            killed.append(process)
        last = fork_server.start(service.url, "close when sent")
        last.wait(60 + len(killed))
    stored = samples(tmp_path / "foreshock.db")
    record_property("kill -9", len(killed))
    record_property("samples stored", sum(map(len, stored.values())))
    assert list(tmp_path.rglob("*.spool")) == []
    assert AgentConfig.send_every_seconds <= 1.0, "samples are unsent for longer than promised"
    for process in killed:
        assert len(stored.get(process.boot, [])) >= process.steps_before_the_last_batch()
        spans = [
            (since, step) for _, since, step in stored.get(process.boot, [])
        ]  # empty if killed within the first second
        assert not spans or spans[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(spans)), "a sample is missing or duplicated"
