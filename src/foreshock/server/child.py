"""The service as a child process, for runs that start their own service, and for tests."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from foreshock.server import WITH_PARENT


class ServiceProcess:
    """`with ServiceProcess(folder) as service:` runs a service on a free port of 127.0.0.1, at `service.url`.

    The store is a file in `folder` unless `environment` names another, so that a restarted service finds it. The child
    does not inherit settings (FORESHOCK_...) of this process. It ends with this process, even if that is killed, unless
    a forked child of this process is still running.
    """

    module: tuple[str, ...] = ("foreshock.server",)
    """The module to run, and its arguments."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.url = ""
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")},
            "FORESHOCK_PORT": "0",
            "FORESHOCK_DATABASE_URL": f"sqlite:///{folder / 'foreshock.db'}",
            **(environment or {}),
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self, timeout_seconds: float = 60.0) -> Self:
        """Start the process and wait until it listens. Raises OSError with its output if it does not."""
        path = self.folder / "service.log"
        with path.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *self.module, WITH_PARENT],
                env=self._environment,
                stdin=subprocess.PIPE,  # the system closes it when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        late = threading.Timer(timeout_seconds, self._process.kill)
        late.start()
        line = self._process.stdout.readline() if self._process.stdout else ""  # empty if the process ends
        late.cancel()
        if "listening on " not in line:
            self.kill()
            port = self._environment["FORESHOCK_PORT"]
            raise OSError(f"the service did not start on port {port}: {(line + path.read_text()).strip()[-500:]}")
        self.url = line.rpartition("listening on ")[2].strip()
        return self

    @property
    def pid(self) -> int:
        """The process id of the service. Raises RuntimeError if it was not started."""
        if self._process is None:
            raise RuntimeError("the service was not started; call start()")
        return self._process.pid

    def stop(self, timeout_seconds: float = 20.0) -> int:
        """Stop the service with SIGTERM; return its exit status."""
        return self._end(signal.SIGTERM, timeout_seconds)

    def kill(self) -> None:
        """Kill the service (SIGKILL)."""
        self._end(signal.SIGKILL, 20.0)

    def _end(self, number: signal.Signals, timeout_seconds: float) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)  # does nothing if the process has ended
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
