"""PostgreSQL itself killed with kill -9: the service lives on, keeps what it acknowledged, and needs no restart."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.running import eventually
from tests.server.postgresql import PostgresServer, new_database
from tests.server.senders import Sender
from tests.server.test_postgres import MIGRATE, stored

from foreshock.server.store.database import Store
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
                    eventually("it says that it waits", lambda: client.get("/readyz").status_code == 503)
                    assert client.get("/healthz").status_code == 200
                    refused = client.get("/v1/runs")
                    assert (refused.status_code, refused.json()["detail"]) == (503, AWAY)
                finally:
                    server.start()
            _until_each_has_sent_more(senders)
            eventually("it is ready", lambda: client.get("/readyz").status_code == 200)
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


def _until_each_has_sent_more(senders: list[Sender]) -> None:
    before = [sender.acknowledged for sender in senders]

    def more() -> bool:
        return all(sender.acknowledged > said for sender, said in zip(senders, before, strict=True))

    eventually("each sender's batches are acknowledged", more)


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
    migrating.communicate()

    async def look() -> None:
        store = Store(url)
        await store.migrate()
        await store.check_schema()
        await store.close()

    asyncio.run(look())
