"""A real service in its own process, for tests: real socket, real store, killed when the test says so."""

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx


class LiveService:
    """`with LiveService(folder) as service:` serves on a free port of 127.0.0.1; `service.url` is its address.

    The store is a file in `folder` unless `environment` names another, so that a service started again finds it.
    """

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.url = ""
        self._environment = {
            "FORESHOCK_PORT": "0",
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
