import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from foreshock.server.store import audit
from foreshock.server.store.database import Store, StoreError
from foreshock.server.store.retention import delete_old_runs
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
        assert await delete_old_runs(store, 500.0, time.time()) == 1
        assert [run["run"] for run in (await service.get("/v1/runs"))["runs"]] == ["new"]
        async with store.read() as connection:
            for table in ("samples", "boots", "events", "warnings", "batches"):
                assert (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar() in (1, 2)
        assert len((await service.get("/v1/audit"))["rows"]) == 1

    play(story)
