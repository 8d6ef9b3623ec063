"""PostgreSQL itself killed with kill -9: the service lives on, keeps what it acknowledged, and needs no restart."""

import asyncio
import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.server.postgresql import PostgresServer, new_database
from tests.server.senders import Sender
from tests.server.test_postgres import MIGRATE, stored

from foreshock.server import readings
from foreshock.server.store import retention as sweeping
from foreshock.server.store.database import Store, is_away
from foreshock.server.testing import FakeRank, LiveService

pytestmark = [pytest.mark.servers, pytest.mark.promise("S1")]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL of this module's own, which is killed."""
    made = PostgresServer()
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture
def url(server: PostgresServer) -> str:
    """A database of its own."""
    return asyncio.run(new_database(server.url))


@pytest.mark.full
def test_killed_under_ingest_nothing_acknowledged_is_lost_and_the_service_says_that_it_waits(
    server: PostgresServer, url: str, tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    kills, when = sizes("postgres_kills", quick=1, long=50), random.Random(23)
    environment = {"FORESHOCK_DATABASE_URL": url, "FORESHOCK_MIGRATE": "true"}
    with LiveService(tmp_path, environment) as service, service.client() as client:
        senders = [Sender(lambda: service.url, FakeRank(run="killed", rank=number)) for number in range(3)]
        try:
            for _ in range(kills):
                _until_each_has_sent_more(senders)
                time.sleep(when.uniform(0, 0.3))
                server.kill()
                try:
                    _until(lambda: client.get("/readyz").status_code == 503)
                    assert client.get("/healthz").status_code == 200
                    refused = client.get("/v1/runs")
                    assert (refused.status_code, refused.json()["detail"]) == (503, AWAY)
                finally:
                    server.start()
            _until_each_has_sent_more(senders)
            _until(lambda: client.get("/readyz").status_code == 200)
        finally:
            for sender in senders:
                sender.stop()
    kept = asyncio.run(stored(url))
    acknowledged = {(s.rank.rank, sequence) for s in senders for sequence in range(1, s.acknowledged + 1)}
    record_property("kill -9 of PostgreSQL", kills)
    record_property("batches acknowledged", len(acknowledged))
    record_property("lost", len(acknowledged - kept))
    assert acknowledged <= kept
    log = (tmp_path / "service.log").read_text()
    assert "Traceback" not in log, log[-2000:]


AWAY = "The store cannot be used just now; try again."


def _until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _until_each_has_sent_more(senders: list[Sender]) -> None:
    before = [sender.acknowledged for sender in senders]
    _until(lambda: all(sender.acknowledged > said for sender, said in zip(senders, before, strict=True)))


@pytest.mark.full
@pytest.mark.promise("S16")
def test_killed_while_replicas_migrate_the_next_start_ends_the_migration(server: PostgresServer, url: str) -> None:
    migrating = subprocess.Popen(
        [sys.executable, "-c", MIGRATE, url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert migrating.stdin is not None
    migrating.stdin.write("go\n")
    migrating.stdin.flush()
    time.sleep(random.Random(5).uniform(0.5, 1.5))
    server.kill()
    server.start()
    migrating.communicate(timeout=60)

    async def look() -> None:
        store = Store(url)
        await store.migrate()
        await store.check_schema()
        await store.close()

    asyncio.run(look())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:<psycopg.ServerCursor:ResourceWarning")  # it cannot be closed: its server is gone
def test_killed_while_old_runs_leave_and_curves_are_rolled_up_both_end_at_the_next_try(
    server: PostgresServer, url: str, player: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "_SAMPLES_AT_ONCE", 1)  # two hundred commits, so that the kill comes between two

    async def story(service: Any) -> None:
        store = service.app.state.store
        old, live = FakeRank(run="old", layers=1), FakeRank(run="live", layers=1)
        for rank in (old, live):
            await service.store(rank, rank.started(), *(rank.sample(step) for step in range(1, 200)))
        before = await service.get("/v1/runs/live/curves", line="head.risk")
        with store.writer.engine.begin() as connection:
            connection.execute(text("UPDATE runs SET last_seen = last_seen - 1000 WHERE name = 'old'"))
            ids = {r.name: r.id for r in connection.execute(text("SELECT id, name FROM runs"))}
        retention = sweeping.Retention(store, 500.0)
        assert await retention.sweep(monotonic=0.0) == 0
        left = text(f"SELECT count(*) FROM samples WHERE run_id = {ids['old']}")

        async def count() -> int:
            return int(await store.read(lambda connection: connection.execute(left).scalar_one()))

        leaving = asyncio.create_task(retention.sweep(monotonic=51.0))
        while await count() > 195:
            await asyncio.sleep(0)
        rolling = asyncio.create_task(readings.build(store, ids["live"], 0))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(server.kill)
        ended: list[Any] = [*await asyncio.gather(leaving, rolling, return_exceptions=True)]
        assert is_away(ended[0]), ended
        assert ended[1] is True or is_away(ended[1]), ended
        await asyncio.to_thread(server.start)
        assert await retention.sweep(monotonic=60.0) == 1
        assert await readings.build(store, ids["live"], 0)
        del ended, leaving, rolling  # each holds what failed, with its frames
        gc.collect()  # the cursor that the kill left open, while its warning is left out
        assert [run["run"] for run in (await service.get("/v1/runs"))["runs"]] == ["live"]
        after = await service.get("/v1/runs/live/curves", line="head.risk")
        assert after["lines"][0]["steps"] == before["lines"][0]["steps"]

    asyncio.run(player(url, story, migrate=True))
