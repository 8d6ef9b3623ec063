"""Old runs leave, a few at a time, and nothing else does; no row of the audit trail ever."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

from foreshock.server.store import audit
from foreshock.server.store.retention import Retention, delete_run
from foreshock.server.testing import FakeRank


async def test_old_runs_are_deleted_and_the_audit_trail_stays(service: Any) -> None:
    old, new = FakeRank(run="old"), FakeRank(run="new")
    for rank in (old, new):
        await service.store(rank, rank.started(), rank.sample(1), rank.verdict(1))
    store = service.app.state.store
    with store.writer.engine.begin() as connection:
        audit.append(connection, actor="ann", action="command", run="old")
        connection.execute(text("UPDATE runs SET last_seen = last_seen - 1000 WHERE name = 'old'"))
    retention = Retention(store, 500.0)
    assert [await retention.sweep(monotonic=at) for at in (0.0, 40.0, 51.0)] == [0, 0, 1]
    assert [run["run"] for run in (await service.get("/v1/runs"))["runs"]] == ["new"]
    with store.reader.engine.begin() as connection:
        for table in ("samples", "boots", "events", "warnings"):
            found = connection.execute(text(f"SELECT name FROM {table} LEFT JOIN runs ON runs.id = run_id"))
            assert set(found.scalars()) == {"new"}, table
        assert connection.execute(text("SELECT count(*) FROM batches")).scalar() == 1
    assert len((await service.get("/v1/audit"))["rows"]) == 1


@pytest.mark.promise("S17")
async def test_a_clock_that_jumps_ahead_for_a_while_deletes_no_run(service: Any) -> None:
    for name in ("live", "silent"):
        rank = FakeRank(run=name)
        await service.store(rank, rank.started(), rank.sample(1))
    retention, day = Retention(service.app.state.store, 90 * 86_400.0), 86_400.0
    ahead = time.time() + 91 * day
    assert await retention.sweep(now=ahead, monotonic=0.0) == 0
    assert await retention.sweep(now=ahead, monotonic=14.0) == 0
    assert await retention.sweep(monotonic=24.0) == 0  # the clock is right again
    assert await retention.sweep(now=ahead, monotonic=5000.0) == 0
    assert {run["run"] for run in (await service.get("/v1/runs"))["runs"]} == {"live", "silent"}


@pytest.mark.promise("S17")
async def test_old_runs_leave_a_few_at_a_time_and_the_log_names_them(service: Any) -> None:
    for number in range(25):
        rank = FakeRank(run=f"run-{number:02}", layers=1)
        await service.store(rank, rank.started(), rank.sample(1))
    retention, ahead = Retention(service.app.state.store, 86_400.0), time.time() + 2 * 86_400.0
    with capture_logs() as said:
        swept = [await retention.sweep(now=ahead, monotonic=at) for at in (0.0, 3000.0, 3600.0, 3610.0, 3620.0)]
    assert swept == [0, 0, 10, 10, 5]
    named = [name for line in said if line["event"] == "old runs deleted" for name in line["runs"]]
    assert sorted(named) == [f"run-{number:02}" for number in range(25)]


@pytest.mark.promise("S17")
async def test_what_a_deleted_run_took_goes_back_to_the_disk_a_little_at_a_time(service: Any) -> None:
    store = service.app.state.store

    async def size() -> int:
        with store.reader.engine.begin() as connection:
            connection.execute(text("PRAGMA wal_checkpoint(PASSIVE)"))
            return int(connection.execute(text("PRAGMA page_count")).scalar())

    empty = await size()
    rank = FakeRank(layers=12, heads=range(12))
    await service.store(rank, rank.started(), *(rank.sample(step) for step in range(1, 500)))
    full = await size()
    assert full > empty + 2048
    assert await delete_run(store, 1, time.time() + 1)
    await store.give_back()
    assert await size() == full  # what is kept for the next run is more
    await store.give_back(kept=100)
    once = await size()
    assert full - 2100 < once < full - 2000
    await store.give_back(kept=100)
    assert await size() < empty + 200
    await service.store(FakeRank(), FakeRank().started())


ORDER = {"who": "ann", "mode": "exact_delta", "reason": "it drifts"}
CHANGES = ("UPDATE audit SET actor = 'eve'", "DELETE FROM audit WHERE sequence = 1", "DELETE FROM audit")


@pytest.mark.promise("S11")
def test_no_row_of_a_store_can_be_changed_deleted_or_truncated(on_both: Callable[..., None]) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        for _ in range(3):
            assert (await service.client.post("/v1/runs/run-1/commands", json=ORDER)).status_code == 201
        before = await service.get("/v1/audit")
        engine = service.app.state.store.writer.engine
        for change in (*CHANGES, *(("TRUNCATE audit",) if engine.dialect.name == "postgresql" else ())):
            with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
                connection.exec_driver_sql(change)
        assert await service.get("/v1/audit") == before
        assert len(before["rows"]) >= 3

    on_both(story)
