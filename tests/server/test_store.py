import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from structlog.testing import capture_logs

from foreshock.server.store import audit
from foreshock.server.store.database import Store, StoreError
from foreshock.server.store.retention import Retention
from foreshock.server.store.schema import metadata
from foreshock.server.testing import FakeRank


@pytest.mark.promise("S16")
def test_the_migrations_make_exactly_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        await store.migrate()
        await store.migrate()
        await store.check_schema()
        async with store.engine.connect() as connection:
            changes = await connection.run_sync(lambda c: compare_metadata(MigrationContext.configure(c), metadata))
            mode = (await connection.execute(text("PRAGMA journal_mode"))).scalar()
            synchronous = (await connection.execute(text("PRAGMA synchronous"))).scalar()
        assert changes == []
        assert (mode, synchronous) == ("wal", 2)
        await store.close()

    asyncio.run(look())


@pytest.mark.promise("S16")
def test_a_database_of_a_newer_version_or_of_none_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        with pytest.raises(StoreError, match="FORESHOCK_MIGRATE"):
            await store.check_schema()
        await store.migrate()
        async with store.write() as connection:
            await connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(StoreError, match="newer foreshock"):
            await store.migrate()
        await store.close()

    asyncio.run(look())


def test_old_runs_are_deleted_and_the_audit_trail_stays(play: Any) -> None:
    async def story(service: Any) -> None:
        old, new = FakeRank(run="old"), FakeRank(run="new")
        for rank in (old, new):
            await service.store(rank, rank.started(), rank.sample(1), rank.verdict(1))
        store = service.app.state.store
        async with store.write() as connection:
            await audit.append(store, connection, actor="ann", action="command", run="old")
            await connection.execute(text("UPDATE runs SET last_seen = last_seen - 1000 WHERE name = 'old'"))
        retention = Retention(store, 500.0)
        assert [await retention.sweep(monotonic=at) for at in (0.0, 40.0, 51.0)] == [0, 0, 1]
        assert [run["run"] for run in (await service.get("/v1/runs"))["runs"]] == ["new"]
        async with store.read() as connection:
            for table in ("samples", "boots", "events", "warnings"):
                found = await connection.execute(text(f"SELECT name FROM {table} LEFT JOIN runs ON runs.id = run_id"))
                assert set(found.scalars()) == {"new"}, table
            assert (await connection.execute(text("SELECT count(*) FROM batches"))).scalar() == 1
        assert len((await service.get("/v1/audit"))["rows"]) == 1

    play(story)


@pytest.mark.promise("S17")
def test_a_clock_that_jumps_ahead_for_a_while_deletes_no_run(play: Any) -> None:
    async def story(service: Any) -> None:
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

    play(story)


@pytest.mark.promise("S17")
def test_old_runs_leave_a_few_at_a_time_and_the_log_names_them(play: Any) -> None:
    async def story(service: Any) -> None:
        for number in range(25):
            rank = FakeRank(run=f"run-{number:02}", layers=1)
            await service.store(rank, rank.started(), rank.sample(1))
        retention, ahead = Retention(service.app.state.store, 86_400.0), time.time() + 2 * 86_400.0
        with capture_logs() as said:
            swept = [await retention.sweep(now=ahead, monotonic=at) for at in (0.0, 3000.0, 3600.0, 3610.0, 3620.0)]
        assert swept == [0, 0, 10, 10, 5]
        named = [name for line in said if line["event"] == "old runs deleted" for name in line["runs"]]
        assert sorted(named) == [f"run-{number:02}" for number in range(25)]

    play(story)


def test_what_belongs_to_a_boot_is_found_by_an_index(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        await store.migrate()
        async with store.read() as connection:
            for table in ("samples", "events", "warnings", "batches", "grams"):
                plan = await connection.execute(text(f"EXPLAIN QUERY PLAN DELETE FROM {table} WHERE boot_id = 1"))
                [row] = plan.all()
                assert row.detail.startswith("SEARCH"), row.detail
        await store.close()

    asyncio.run(look())
