"""Tasks that may hang, in processes of their own that are killed where they say nothing for long."""

import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, Final

BROKEN: Final = 3
"""How a process ends that asks for another to go on with its other tasks."""


class Watched:
    """Carries out `tasks` by `command task...`, which prints one line of JSON for each; begins at once.

    A process that prints none for `patience` seconds is killed, and what it was at counts as wrong; another begins with
    the next task, up to the third such end. No process is begun later than `ends`, in seconds of `time.monotonic`.
    """

    def __init__(self, command: Sequence[str], tasks: list[str], patience: float, ends: float) -> None:
        self.results: list[dict[str, Any]] = []
        self._command, self._tasks, self._patience, self._ends = command, tasks, patience, ends
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> list[dict[str, Any]]:
        """What each task that was begun said, with its name as `task`, in their order."""
        self._thread.join()
        return self.results

    def _run(self) -> None:
        for _ in range(3):
            if self._tasks and time.monotonic() < self._ends:
                self._begin()

    def _begin(self) -> None:
        process = subprocess.Popen([*self._command, *self._tasks], stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        while self._tasks:
            left = max(1.0, min(self._patience, self._ends - time.monotonic()))
            try:
                line = lines.get(timeout=left)
            except queue.Empty:
                process.kill()
                self._note({"wrong": [f"said nothing for {left:.0f} s"]})
                break
            if line:
                self._note(json.loads(line))
                continue
            if process.wait() != BROKEN:
                self._note({"wrong": [f"ended with {process.returncode} ({_name(process.returncode)})"]})
            break
        process.kill()
        process.wait()
        reader.join()

    def _note(self, said: dict[str, Any]) -> None:
        self.results.append({"task": self._tasks.pop(0), **said})
        print(json.dumps(self.results[-1]), flush=True)


def _read(pipe: IO[str], into: "queue.Queue[str]") -> None:
    with pipe:
        for line in pipe:
            if line.startswith("{"):
                into.put(line)
    into.put("")


def _name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else "exit status"
