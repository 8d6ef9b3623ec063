"""Replicas and PostgreSQL killed with kill -9: acknowledged batches are preserved, and the service recovers."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from tests.e2e.running import eventually
from tests.server.postgresql import PostgresServer, new_database
from tests.server.senders import Sender

from foreshock.server.store.database import Store
from foreshock.server.testing import FakeRank, LiveService

pytestmark = pytest.mark.servers


@pytest.fixture
def postgres_for_replicas(postgres: str) -> str:
    """A new database."""
    return asyncio.run(new_database(postgres))


@pytest.mark.full
@pytest.mark.promise("S1")
@pytest.mark.promise("S11")
def test_killed_replicas_lose_no_acknowledged_batch_and_each_rank_answers_once(
    postgres_for_replicas: str,
    tmp_path: Path,
    sizes: Any,
    record_property: Callable[[str, Any], None],
) -> None:
    most, until = sizes("replica_kills", quick=3, long=100), sizes.until()
    environment = {"FORESHOCK_DATABASE_URL": postgres_for_replicas, "FORESHOCK_MIGRATE": "true"}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    replicas = [LiveService(folder, environment).start() for folder in folders]
    turns = count()

    def address() -> str:
        """The URL of the next replica, running or not, as behind a load balancer."""
        return replicas[next(turns) % len(replicas)].url

    senders = [Sender(address, FakeRank(run="killed", rank=number)) for number in range(3)]
    when = random.Random(3)
    ordered: list[str] = []
    try:
        eventually(
            "every rank has sent a batch, so that each order is for all ranks",
            lambda: all(s.acknowledged for s in senders),
        )
        while len(ordered) < most and time.monotonic() < until:
            turn = len(ordered)
            time.sleep(when.uniform(0.2, 0.8))
            ordering = threading.Thread(target=lambda turn=turn: ordered.append(order(address, turn)))
            ordering.start()
            time.sleep(when.uniform(0.0, 0.02))
            killed = replicas if turn % 3 == 2 else [replicas[turn % 2]]
            for replica in killed:
                replica.kill()
            for replica in killed:
                replica.start()
            ordering.join(600)
            assert len(ordered) == turn + 1
        with httpx.Client(base_url=address(), timeout=120.0, trust_env=False) as client:

            def all_applied() -> bool:
                return {client.get(f"/v1/commands/{name}").json()["state"] for name in ordered} == {"applied"}

            eventually("every rank has answered every order", all_applied, every=0.2)
            for sender in senders:
                sender.stop()
            for name in ordered:
                answers = client.get(f"/v1/commands/{name}").json()["ranks"]
                assert [(a["rank"], a["step"]) for a in answers] == [(s.rank.rank, s.orders[name]) for s in senders]
            query = "/v1/runs/killed/curves?line=run.loss&max_points=10000"
            [line] = client.get(query).json()["lines"]
            # All ranks report the same loss at a step, so this finds missing steps; `stored` finds duplicates.
            assert line["last"] == [float(step) for step in line["steps"]]
            assert line["steps"] == list(range(1, line["steps"][-1] + 1))
        assert asyncio.run(stored(postgres_for_replicas)) >= {
            (sender.rank.rank, sequence) for sender in senders for sequence in range(1, sender.acknowledged + 1)
        }
        assert min(sender.acknowledged for sender in senders) > 5
        record_property("kill -9", len(ordered) + len(ordered) // 3)
        record_property("commands, each answered once by each rank", len(ordered))
        record_property("deliveries repeated", sum(sender.delivered_again for sender in senders))
        record_property("batches acknowledged", sum(sender.acknowledged for sender in senders))
    finally:
        for sender in senders:
            sender.stop()
        for replica in replicas:
            replica.stop()


def order(address: Callable[[], str], turn: int) -> str:
    """Order a switch, with retries until the order is acknowledged, and return its id."""
    body = {"who": "ann", "reason": "drift", "heads": [[0, turn % 3]], "mode": "exact_delta"}
    headers = {"idempotency-key": f"order-{turn}"}
    while True:
        try:
            response = httpx.post(f"{address()}/v1/runs/killed/commands", json=body, headers=headers, timeout=60.0)
        except httpx.HTTPError:
            time.sleep(0.05)
            continue
        if response.status_code in (200, 201):
            return str(response.json()["id"])
        assert response.status_code in (404, 503), response.text  # the run does not exist before its first batch
        time.sleep(0.05)


async def stored(url: str) -> set[tuple[int, int]]:
    """(rank, sequence) of every batch, which the primary key makes unique. No batch may have two samples."""
    store = Store(url)
    with store.reader.engine.begin() as connection:
        query = text("SELECT rank, sequence FROM batches JOIN boots ON boots.id = boot_id ORDER BY 1, 2")
        found = [(rank, sequence) for rank, sequence in connection.execute(query)]
        duplicates = text("SELECT count(*) FROM samples GROUP BY boot_id, sequence HAVING count(*) > 1")
        assert connection.execute(duplicates).all() == []
    await store.close()
    return set(found)


MIGRATE = """
import asyncio, sys
from foreshock.server.store.database import Store
async def migrate():
    store = Store(sys.argv[1])
    sys.stdin.readline()
    await store.migrate()
    await store.check_schema()
    await store.close()
asyncio.run(migrate())
"""


@pytest.mark.full
def test_concurrent_migrations_all_succeed(postgres_for_replicas: str, sizes: Any) -> None:
    number = sizes("migrating_replicas", quick=4, long=24)
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATE, postgres_for_replicas],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(number)
    ]
    time.sleep(number / 2)  # until most of them wait for their input
    for replica in replicas:
        assert replica.stdin is not None
        replica.stdin.write("go\n")
        replica.stdin.flush()
    errors = [replica.communicate()[1][-300:] for replica in replicas]
    assert [replica.returncode for replica in replicas] == [0] * number, errors


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server that the tests of this module kill."""
    made = PostgresServer()
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture
def url(server: PostgresServer) -> str:
    """A new database."""
    return asyncio.run(new_database(server.url))


@pytest.mark.full
@pytest.mark.promise("S1")
def test_killed_postgresql_loses_no_acknowledged_batch_and_service_returns_503(
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
                    eventually("the service is not ready", lambda: client.get("/readyz").status_code == 503)
                    assert client.get("/healthz").status_code == 200
                    refused = client.get("/v1/runs")
                    assert (refused.status_code, refused.json()["detail"]) == (503, UNAVAILABLE)
                finally:
                    server.start()
            _until_each_has_sent_more(senders)
            eventually("the service is ready again", lambda: client.get("/readyz").status_code == 200)
        finally:
            for sender in senders:
                sender.stop()
    found = asyncio.run(stored(url))
    acknowledged = {(s.rank.rank, sequence) for s in senders for sequence in range(1, s.acknowledged + 1)}
    record_property("kill -9 of PostgreSQL", kills)
    record_property("batches acknowledged", len(acknowledged))
    record_property("lost", len(acknowledged - found))
    assert acknowledged <= found
    log = (tmp_path / "service.log").read_text()
    assert "Traceback" not in log, log[-2000:]


UNAVAILABLE = "The store is unavailable; try again."


def _until_each_has_sent_more(senders: list[Sender]) -> None:
    before = [sender.acknowledged for sender in senders]

    def more() -> bool:
        return all(sender.acknowledged > earlier for sender, earlier in zip(senders, before, strict=True))

    eventually("each sender's batches are acknowledged", more)


@pytest.mark.full
@pytest.mark.promise("S1")
@pytest.mark.promise("S16")
async def test_interrupted_migration_is_completed_by_next_start(server: PostgresServer, url: str) -> None:
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

    store = Store(url)
    await store.migrate()
    await store.check_schema()
    await store.close()
