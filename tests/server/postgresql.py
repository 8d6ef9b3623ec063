"""A PostgreSQL of the tests' own."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    known = [Path(on_path).parent] if on_path else []
    return next(
        (p for p in (*known, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))) if (p / "initdb").exists()), None
    )


@contextmanager
def started_postgres() -> Iterator[str]:
    """The URL of a new PostgreSQL on a free loopback port."""
    binaries = _binaries()
    if binaries is None:
        message = "PostgreSQL is missing; `make test` installs it with Debian's package postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    folder = Path(tempfile.mkdtemp(prefix="foreshock-pg-"))
    as_postgres = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        as_postgres = {"user": "postgres", "group": "postgres", "extra_groups": []}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    common: dict[str, Any] = {**as_postgres, "cwd": folder, "check": True, "stdout": subprocess.DEVNULL}
    make: list[Any] = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
    subprocess.run(make, **common)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    control: list[Any] = [binaries / "pg_ctl", "-D", data, "-w", "-l", folder / "log"]
    subprocess.run([*control, "-o", options, "start"], **common)
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **common)
        shutil.rmtree(folder)


async def new_database(postgres: str, name: str) -> str:
    """The URL of a new database on the server of this URL."""
    connection = await asyncpg.connect(postgres)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return f"{postgres.rpartition('/')[0]}/{name}"


async def deadlocks(url: str) -> int:
    """How often the server has broken a deadlock in this database; its counters lag by a second at most."""
    await asyncio.sleep(1.5)
    connection = await asyncpg.connect(url)
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    found: int = await connection.fetchval(query)
    await connection.close()
    return found
