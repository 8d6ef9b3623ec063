"""A PostgreSQL server for the tests."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg
from tests.e2e.running import absent


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    known = [Path(on_path).parent] if on_path else []
    return next(
        (p for p in (*known, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))) if (p / "initdb").exists()), None
    )


class PostgresServer:
    """A PostgreSQL server on a free loopback port that can be killed and restarted."""

    def __init__(self) -> None:
        binaries = _binaries()
        if binaries is None:
            absent("PostgreSQL")
        self._folder = Path(tempfile.mkdtemp(prefix="foreshock-pg-"))
        as_postgres = {}
        if os.geteuid() == 0:  # the server refuses to run as root
            shutil.chown(self._folder, "postgres", "postgres")
            as_postgres = {"user": "postgres", "group": "postgres", "extra_groups": []}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        data = self._folder / "data"
        self._common: dict[str, Any] = {**as_postgres, "cwd": self._folder, "stdout": subprocess.DEVNULL}
        make: list[Any] = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
        subprocess.run(make, check=True, **self._common)
        self._control: list[Any] = [binaries / "pg_ctl", "-D", data, "-w", "-l", self._folder / "log"]
        self.url = f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start the server and wait until it accepts connections, after recovery if it was killed."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        subprocess.run([*self._control, "-o", options, "start"], check=True, **self._common)

    def kill(self) -> None:
        """Send SIGKILL to the server and to all of its child processes."""
        server = psutil.Process(int((self._folder / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=20)

    def remove(self) -> None:
        """Stop the server and delete its files."""
        subprocess.run(
            [*self._control, "-m", "immediate", "stop"], check=False, stderr=subprocess.DEVNULL, **self._common
        )
        shutil.rmtree(self._folder)


@contextmanager
def started_postgres() -> Iterator[str]:
    """The URL of a new PostgreSQL server on a free loopback port."""
    server = PostgresServer()
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


async def new_database(postgres: str) -> str:
    """The URL of a new database on the server of this URL."""
    name = f"new_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"{postgres.rpartition('/')[0]}/{name}"


async def deadlocks(url: str) -> int:
    """The number of deadlocks in this database. PostgreSQL updates its counters within a second."""
    await asyncio.sleep(1.5)
    with psycopg.connect(url) as connection:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0
