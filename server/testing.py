"""For tests: a real service in its own process (real socket, real store), and batches as a rank would send them."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from foreshock.contract.slots import Slot, Words, identity_row
from foreshock.contract.wire import (
    Array,
    Batch,
    Command,
    Event,
    Layer,
    Outcome,
    Policy,
    Sample,
    Started,
    Switched,
    Verdict,
    head_refs,
)


class LiveService:
    """`with LiveService(folder) as service:` serves on a free port of 127.0.0.1; `service.url` is its address.

    The store is a file in `folder` unless `environment` names another, so that a service started again finds it.
    """

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.url = ""
        self._environment = {
            "FORESHOCK_PORT": "0",
            "FORESHOCK_METRICS_SECONDS": "0",
            "FORESHOCK_DATABASE_URL": f"sqlite:///{folder / 'foreshock.db'}",
            **(environment or {}),
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self, timeout_seconds: float = 30.0) -> Self:
        """Start the process and wait until it listens. Raises RuntimeError with its log when it does not."""
        folder_of_log = self.folder / "service.log"
        with folder_of_log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "foreshock.server"],
                env={**os.environ, **self._environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process, lines), daemon=True).start()
        try:
            said = lines.get(timeout=timeout_seconds)
        except queue.Empty:
            said = ""
        if "listening on " not in said:
            self.kill()
            raise RuntimeError(f"the service did not start:\n{folder_of_log.read_text()[-4000:]}")
        self.url = said.rpartition("listening on ")[2].strip()
        return self

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        if process.stdout is not None:
            with process.stdout as stdout:
                for line in stdout:
                    lines.put(line)
        lines.put("")

    @property
    def pid(self) -> int:
        """The service's process. Raises RuntimeError when it was not started."""
        if self._process is None:
            raise RuntimeError("the service was not started; call start()")
        return self._process.pid

    def client(self, token: str | None = None, timeout: float = 30.0) -> httpx.Client:
        """A client of the service."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def stop(self, timeout_seconds: float = 20.0) -> int:
        """Ask it to go (SIGTERM); its exit status."""
        return self._end(signal.SIGTERM, timeout_seconds)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL, 20.0)

    def _end(self, number: signal.Signals, timeout_seconds: float) -> int:
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class FakeRank:
    """Makes the batches that one boot of one rank would send; values are a function of step, rank and boot."""

    def __init__(
        self, run: str = "run-1", rank: int = 0, boot: str = "b1", layers: int = 2, heads: Sequence[int] = (0, 1, 2)
    ) -> None:
        self.run, self.rank, self.boot, self.sequence = run, rank, boot, 0
        self.layers = tuple(
            Layer(
                layer=number,
                name=f"h.{number}.attn",
                heads=tuple(heads),
                kv_heads=len(heads),
                head_dim=16,
                served_by="reference",
            )
            for number in range(layers)
        )
        self.count = layers * len(heads)

    def batch(self, *events: Event, sequence: int | None = None) -> Batch:
        """The next batch, or the one with this sequence."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        return Batch(run=self.run, rank=self.rank, boot=self.boot, sequence=self.sequence, events=events)

    def started(self, step: int = 0, policy: Policy = "auto") -> Started:
        """The first event of the boot."""
        return Started(
            step=step, unix_seconds=1.0, layers=self.layers, policy=policy, numerics="kernel", labels={"model": "gpt"}
        )

    def words(self, step: int) -> Words:
        """Head states, [heads, SLOT_COUNT]."""
        random = np.random.default_rng([step, self.rank, len(self.boot), *self.boot.encode()])
        words = np.tile(identity_row(), (self.count, 1))
        floats = words.view(np.float64)
        words[:, Slot.ROWS] = 1000
        words[:, Slot.ROWS_TIED_BF16] = random.integers(0, 1000, self.count)
        floats[:, Slot.SCORE_MAX] = random.normal(size=self.count) * 10
        floats[:, Slot.ROW_MAX_ABS] = np.abs(floats[:, Slot.SCORE_MAX])
        floats[:, Slot.OFFSET_SUM] = random.normal(size=self.count) * 1000
        floats[:, Slot.OFFSET_SUMSQ] = floats[:, Slot.OFFSET_SUM] ** 2
        floats[:, Slot.DELTA_BIAS_SUM] = random.normal(size=self.count)
        floats[:, Slot.DELTA_BIAS_ABS] = 10.0
        floats[:, Slot.DELTA_BIAS_SUMSQ] = 4.0
        return words

    def sample(self, step: int, since: int | None = None, loss: float | None = 3.0, mode: int = 0) -> Sample:
        """The sample of a step."""
        return Sample(
            step=step,
            since_step=step - 1 if since is None else since,
            unix_seconds=float(step),
            states=Array.of(self.words(step)),
            modes=Array.of(np.full(self.count, mode, dtype=np.int32)),
            risk=Array.of(np.linspace(0.0, 0.9, self.count).astype(np.float32)),
            loss=loss,
            grad_norm=1.0 + self.rank,
            learning_rate=1e-3,
            step_seconds=0.5,
            agent_seconds=1e-4,
        )

    def verdict(self, step: int, layer: int = 0, head: int = 2, name: str = "warn-1", **changes: Any) -> Verdict:
        """A raised warning."""
        fields: dict[str, Any] = {
            "state": "raised",
            "severity": "warning",
            "cause": "rounding",
            "signal": "offset",
            "evidence": {"offset": 6.25},
            "forecast_steps": 2100.0,
            "sentence": f"layer {layer} head {head} drifts",
        }
        return Verdict(id=name, step=step, layer=layer, head=head, **{**fields, **changes})

    def answer(self, command: Command, step: int, outcome: Outcome = "applied") -> Switched:
        """The answer to a command."""
        heads = command.heads or tuple(head_refs(self.layers))
        return Switched(
            id=f"answer-{command.id}"[:120],
            step=step,
            command=command.id,
            outcome=outcome,
            heads=heads,
            before=("plain",) * len(heads),
            after=(command.mode if outcome == "applied" else "plain",) * len(heads),
            reason="ordered",
        )
