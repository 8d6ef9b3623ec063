import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreshock.server.store import Store
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.servers


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    known = [Path(on_path).parent] if on_path else []
    return next(
        (p for p in (*known, *sorted(Path("/usr/lib/postgresql").glob("*/bin"))) if (p / "initdb").exists()), None
    )


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
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


def test_the_whole_path_works_on_postgresql(postgres: str, player: Any) -> None:
    async def story(service: Any) -> None:
        first, second = FakeRank(rank=0), FakeRank(rank=1)
        for rank in (first, second):
            await service.store(rank, rank.started(), rank.sample(10, loss=float("nan")))
        await service.store(first, first.verdict(10, evidence={"ratio": float("inf")}))
        order = {"who": "ann", "reason": "drift", "heads": [[0, 2]], "mode": "exact_delta"}
        made = await service.client.post("/v1/runs/run-1/commands", json=order)
        assert made.status_code == 201
        for rank in (first, second):
            [command] = (await service.store(rank, rank.sample(20))).commands
            await service.store(rank, rank.answer(command, 21))
        assert (await service.get(f"/v1/commands/{made.json()['id']}"))["state"] == "applied"
        detail = await service.get("/v1/runs/run-1")
        assert (detail["last_step"], detail["active_warnings"]) == (20, 1)
        [line] = (await service.get("/v1/runs/run-1/series", metric="run.loss"))["lines"]
        assert line["last"] == ["NaN", 3.0]
        assert (await service.get("/v1/audit"))["intact"]
        assert 'foreshock_run_step{run="run-1"} 20.0' in (await service.client.get("/metrics")).text

    asyncio.run(player(postgres, story, migrate=True))


def test_two_replicas_share_one_database(postgres: str, player: Any) -> None:
    ranks = [FakeRank(run="shared", rank=number) for number in range(8)]
    batches = [batch for rank in ranks for batch in (rank.batch(rank.started()), rank.batch(rank.sample(1)))]

    async def story(one: Any) -> None:
        async def beside(two: Any) -> None:
            answers = await asyncio.gather(*(service.post(b) for b in batches for service in (one, two)))
            assert {answer.status_code for answer in answers} == {200}
            stored = sum(service.app.state.counters.batches["stored"] for service in (one, two))
            assert stored == len(batches)
            order = {"who": "ann", "reason": "drift", "heads": None, "mode": "exact_delta"}
            await one.client.post("/v1/runs/shared/commands", json=order)
            [command] = (await two.store(ranks[0], ranks[0].sample(2))).commands
            await one.store(ranks[0], ranks[0].answer(command, 3))
            shown = await two.get(f"/v1/commands/{command.id}")
            assert [(a["rank"], a["outcome"]) for a in shown["ranks"]] == [(0, "applied")]
            assert (await two.get("/v1/audit"))["intact"]

        await player(postgres, beside, migrate=True)

    asyncio.run(player(postgres, story, migrate=True))


def test_a_newer_database_is_refused_with_a_sentence(postgres: str) -> None:
    async def look() -> None:
        store = Store(postgres)
        async with store.write() as connection:
            await connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(Exception, match="newer foreshock"):
            await store.check_schema()
        async with store.write() as connection:
            await connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
        await store.close()

    asyncio.run(look())
