"""Starts real servers on free ports, waits until they are ready, and stops them after the test."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx
import pytest

T = TypeVar("T")


def absent(what: str) -> NoReturn:
    """Skip a test whose program is not installed; in CI, fail it."""
    message = f"{what} is not installed; `make servers` installs the Debian packages"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(what: str, look: Callable[[], T | None], seconds: float = 600.0, every: float = 0.1) -> T:
    """The first truthy result of `look`; fails with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(every)


@dataclass(frozen=True)
class Server:
    """A running server: its base URL and its log file."""

    url: str
    log: Path

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")


Start = Callable[..., Server]


@contextmanager
def starter(tmp_path: Path) -> Iterator[Start]:
    """Start a program that listens on `port` and wait until `ready` returns 200; stopped after the test."""
    running: list[subprocess.Popen[bytes]] = []

    def run(command: list[str], port: int, ready: str) -> Server:
        program = command[0]
        if program != sys.executable and shutil.which(program) is None:
            absent(program)
        log = tmp_path / f"{Path(program).name}-{port}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=tmp_path)
        running.append(process)
        server = Server(f"http://127.0.0.1:{port}", log)

        def is_ready() -> bool:
            if process.poll() is not None:
                pytest.fail(f"{program} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
            try:
                return httpx.get(server.url + ready, timeout=10.0).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

        eventually(f"{program} is ready", is_ready)
        return server

    yield run
    for process in reversed(running):
        process.terminate()
    for process in reversed(running):
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prometheus(start: Start, folder: Path, config: str) -> Server:
    """A Prometheus with this configuration, which resends alerts after one second."""
    port = free_port()
    (folder / "prometheus.yml").write_text(config)
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--rules.alert.resend-delay=1s"]
    return start(["prometheus", *options], port, "/-/ready")


def alertmanager(start: Start, folder: Path, config: str) -> Server:
    """An Alertmanager with this configuration."""
    port = free_port()
    (folder / "alertmanager.yml").write_text(config)
    options = [f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'alertmanager'}"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    return start(["prometheus-alertmanager", *options], port, "/-/ready")
