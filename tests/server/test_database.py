"""The database is opened, migrated, or refused in a sentence."""

import asyncio
from pathlib import Path

import pytest

from foreshock.server.store.database import Store, StoreError


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
