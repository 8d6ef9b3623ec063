"""The tables are those that the migrations make, and what is looked up often has an index."""

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from foreshock.server.store.database import Store
from foreshock.server.store.schema import metadata


@pytest.mark.promise("S16")
def test_the_migrations_make_exactly_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        await store.migrate()
        await store.migrate()
        await store.check_schema()
        with store.reader.engine.connect() as connection:
            changes = compare_metadata(MigrationContext.configure(connection), metadata)
            mode = connection.execute(text("PRAGMA journal_mode")).scalar()
            synchronous = connection.execute(text("PRAGMA synchronous")).scalar()
        assert changes == []
        assert (mode, synchronous) == ("wal", 2)
        await store.close()

    asyncio.run(look())


def test_what_belongs_to_a_boot_is_found_by_an_index(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        await store.migrate()
        with store.reader.engine.begin() as connection:
            for table in ("samples", "events", "warnings", "batches"):
                plan = connection.execute(text(f"EXPLAIN QUERY PLAN DELETE FROM {table} WHERE boot_id = 1"))
                [row] = plan.all()
                assert row.detail.startswith("SEARCH"), row.detail
        await store.close()

    asyncio.run(look())
