"""The agent's process, killed at random moments while a real service takes what it sends."""

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


class Lives:
    """Processes of the training script, forked one after the other. Their steps are written to files as they end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(SCRIPT)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, url: str, ending: str) -> "Life":
        """A life that has made ten steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        steps = self._folder / f"steps-{time.monotonic_ns()}"
        self._process.stdin.write(json.dumps([url, str(self._folder / "spool"), ending, str(steps)]) + "\n")
        self._process.stdin.flush()
        while (said := self._process.stdout.readline().split())[:1] != ["ready"]:
            assert said, "the script has ended"  # a life before this one may say how long it took to leave
        return Life(boot=said[1], pid=int(said[2]), steps=steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)


@dataclass(frozen=True)
class Life:
    """One process of the training script, from its start to its end."""

    boot: str
    pid: int
    steps: Path

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait(20)

    def wait(self, seconds: float) -> None:
        """Until the process is gone."""
        deadline = time.monotonic() + seconds
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def steps_before_the_last_cut(self) -> int:
        """The steps that had ended when the sender began to gather the last batch that it kept: it holds their samples.

        A step may end while a batch is gathered: so those before the first that saw the batch before the last.
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
def test_kill_nine_of_the_agent_loses_at_most_a_second_and_the_next_start_sends_the_rest_once(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    """Half of the kills come while the service is away, and what they left waits in the spool for the next start."""
    most, until = sizes("agent_kills", quick=2, long=200), sizes.until()
    when = random.Random(sizes("seed", quick=5, long=5))
    killed: list[Life] = []
    with LiveService(tmp_path) as service, Lives(tmp_path) as lives:
        while not killed or (len(killed) < most and time.monotonic() < until):
            life = lives.start(service.url if len(killed) % 2 else "http://127.0.0.1:9", "never")
            time.sleep(when.uniform(0.0, 0.5))
            life.kill()
            killed.append(life)
        last = lives.start(service.url, "close when sent")
        last.wait(60 + len(killed))
    stored = samples(tmp_path / "foreshock.db")
    record_property("kill -9", len(killed))
    record_property("samples stored", sum(map(len, stored.values())))
    assert list(tmp_path.rglob("*.spool")) == []
    assert AgentConfig.send_every_seconds <= 1.0, "what waits longer is lost"
    for life in killed:
        assert len(stored.get(life.boot, [])) >= life.steps_before_the_last_cut()
        spans = [(since, step) for _, since, step in stored.get(life.boot, [])]  # none: killed within its first second
        assert not spans or spans[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(spans)), "a gap, or a sample twice"
