"""Faults of the store: acknowledged batches are preserved, and ingest resumes when the fault is over."""

import asyncio
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from tests.server import golden_store
from tests.server.senders import Sender

from foreshock.server import recorder
from foreshock.server.testing import FakeRank, LiveService, post

pytestmark = pytest.mark.promise("S1")


def sent(client: httpx.Client, rank: FakeRank, step: int) -> int:
    """Send the batch of a step and return the status code."""
    batch = rank.batch(rank.started(), rank.sample(step, loss=float(step)), sequence=step)
    return post(client, batch).status_code


@contextmanager
def full_disk(service: LiveService) -> Iterator[None]:
    """Limit the size of the write-ahead log to its current size, as if the disk were full."""
    limit = (service.folder / "foreshock.db-wal").stat().st_size
    _, hard = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (hard, hard))


async def test_batches_waiting_for_locked_database_fail_together_with_503(service: Any, tmp_path: Path) -> None:
    ranks = [FakeRank(run=f"run-{number}") for number in range(12)]
    for rank in ranks:
        await service.store(rank, rank.started())
    engine, statements = service.app.state.store.writer.engine, list[str]()
    raw = engine.raw_connection()
    raw.driver_connection.execute("PRAGMA busy_timeout = 1100")
    raw.close()
    event.listen(engine, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement))
    with closing(sqlite3.connect(tmp_path / "foreshock.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        responses = await asyncio.gather(*(service.post(rank.batch(rank.sample(1))) for rank in ranks))
        assert {response.status_code for response in responses} == {503}
        assert all("retry-after" in response.headers for response in responses)
        assert 0 < statements.count("BEGIN IMMEDIATE") < len(ranks) / 2, (
            "batches wait together; a chore may also try to write"
        )
    for rank in ranks:
        assert (await service.post(rank.batch(rank.sample(1), sequence=2))).status_code == 200


@pytest.mark.full
def test_full_disk_refuses_batches_and_ingest_resumes_when_space_returns(
    tmp_path: Path,
) -> None:
    rank = FakeRank()
    with LiveService(tmp_path) as service, service.client() as client:
        for step in range(1, 6):
            assert sent(client, rank, step) == 200
        with full_disk(service):
            assert {sent(client, rank, step) for step in range(6, 16)} == {503}
            time.sleep(1.1)  # /readyz returns the same response for a second
            assert client.get("/readyz").status_code == 503
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/runs/run-1").json()["last_step"] == 5
        for step in range(6, 16):
            assert sent(client, rank, step) == 200, "a refused batch is stored when it is sent again"
        time.sleep(1.1)
        assert client.get("/readyz").status_code == 200
    stored = samples_by_batch(tmp_path / "foreshock.db")
    assert set(stored) == {(0, step) for step in range(1, 16)}
    assert set(stored.values()) == {1}


@pytest.mark.promise("S17")
async def test_backward_clock_jump_does_not_undo_run_state(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, now = FakeRank(), time.time()
    await service.store(rank, rank.started(), rank.sample(1), age=1)
    before = await service.get("/v1/runs/run-1")
    monkeypatch.setattr(recorder, "time", SimpleNamespace(time=lambda: now - 3600))
    await service.store(rank, rank.sample(2), rank.verdict(2), age=2)
    after = await service.get("/v1/runs/run-1")
    assert (after["last_step"], after["active_warnings"], after["status"]) == (2, 1, "active")
    assert after["last_seen_unix_seconds"] >= before["last_seen_unix_seconds"]
    assert (await service.client.get("/metrics")).status_code == 200


# ---- migrations -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.promise("S16")
def test_repeatedly_killed_migration_loses_no_sample(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    kills, path, when = sizes("migration_kills", quick=3, long=60), tmp_path / "foreshock.db", random.Random(11)
    rows = 0
    for turn in range(kills):
        if turn % 10 == 0:
            golden_store.store_at(path)
            rows = _counts(path)["samples"]
        migrating = subprocess.Popen(
            [sys.executable, "-P", "-c", _MIGRATE, f"sqlite:///{path}"], stdout=subprocess.PIPE, text=True
        )
        assert migrating.stdout is not None
        migrating.stdout.readline()
        time.sleep(when.uniform(0, 0.1))
        migrating.send_signal(signal.SIGKILL)
        migrating.wait()
        migrating.stdout.close()
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with LiveService(tmp_path) as service, service.client() as client:
        assert client.get("/readyz").status_code == 200
        assert len(client.get("/v1/runs").json()["runs"]) > 0
    assert _counts(path)["samples"] == rows
    record_property("kill -9 while migrating", kills)


_MIGRATE = """
import asyncio, sys
from foreshock.server.store.database import Store
store = Store(sys.argv[1])
print("go", flush=True)
asyncio.run(store.migrate())
"""


def _counts(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names}


@pytest.mark.full
def test_kill_9_under_load_loses_and_duplicates_no_acknowledged_batch(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    """The service is killed at random moments while three ranks send continuously."""
    most, until = sizes("service_kills", quick=2, long=500), sizes.until()
    when = random.Random(sizes("seed", quick=7, long=7))
    sent: set[tuple[int, int]] = set()
    kills = 0
    while not kills or (kills < most and time.monotonic() < until):
        kills += 1
        with LiveService(tmp_path) as service:
            senders = [Sender(partial(str, service.url), FakeRank(rank=10 * kills + number)) for number in range(3)]
            while not any(sender.acknowledged > 1 for sender in senders):
                time.sleep(0.005)
            time.sleep(when.uniform(0.0, 0.5))
            service.kill()
            for sender in senders:
                sender.stop()  # batch 1 has no sample
                sent |= {(sender.rank.rank, sequence) for sequence in range(2, sender.acknowledged + 1)}
    with LiveService(tmp_path):  # recovers from the last kill
        pass
    stored = samples_by_batch(tmp_path / "foreshock.db")
    record_property("kill -9", kills)
    record_property("batches acknowledged", len(sent))
    record_property("lost", len(sent - stored.keys()))
    record_property("duplicated", sum(count > 1 for count in stored.values()))
    assert sent <= stored.keys()
    assert set(stored.values()) == {1}


def samples_by_batch(database: Path) -> dict[tuple[int, int], int]:
    """The number of samples by (rank, sequence); the test sends one sample in each batch."""
    query = "SELECT rank, sequence, count(*) FROM samples JOIN boots ON boots.id = boot_id GROUP BY boot_id, sequence"
    with closing(sqlite3.connect(database)) as connection:
        return {(rank, sequence): count for rank, sequence, count in connection.execute(query)}
