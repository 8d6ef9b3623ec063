"""The database is opened, migrated to exactly the tables of the code, or refused in a sentence."""

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError

from foreshock.server.readings import unpack_scalars
from foreshock.server.store.database import Store, StoreError
from foreshock.server.store.schema import boots, metadata, runs, samples


@pytest.mark.promise("S16")
def test_a_database_of_another_version_or_of_none_is_refused_with_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        with pytest.raises(StoreError, match="FORESHOCK_MIGRATE"):
            await store.check_schema()
        await store.migrate()
        early = r"schema 0020.*before the first release.*reads 0021.*FORESHOCK_DATABASE_URL"
        for schema, said in (("0020", early), ("9999", "newer foreshock")):
            with store.writer.engine.begin() as connection:
                connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{schema}'")
            for use in (store.migrate, store.check_schema):
                with pytest.raises(StoreError, match=said):
                    await use()
        await store.close()

    asyncio.run(look())


@pytest.mark.parametrize("kind", ["folder", "text", "link"])
def test_what_is_no_database_keeps_the_rights_that_it_has(tmp_path: Path, kind: str) -> None:
    """A misspelt address may name the system's own files, and the service may run as root."""
    path, text_file = tmp_path / "x.db", tmp_path / "passwd"
    text_file.write_text("root:x:0:0\n")
    text_file.chmod(0o644)
    if kind == "folder":
        path.mkdir(0o755)
    else:
        path.symlink_to(text_file) if kind == "link" else text_file.rename(path)
    before = path.stat().st_mode

    async def look() -> None:
        store = Store(f"sqlite:///{path}")
        with pytest.raises(SQLAlchemyError):
            await store.migrate()
        await store.close()

    asyncio.run(look())
    assert path.stat().st_mode == before


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


@pytest.mark.promise("S16")
def test_numbers_of_a_sample_stay_nan_when_the_column_of_another_goes(tmp_path: Path) -> None:
    """Each bit of `nan_columns` is a number's; schema 0023 had the largest loss in the second place."""
    before = ("loss", "loss_max", "grad_norm", "learning_rate", "step_seconds", "agent_seconds")
    gone = ("unix_seconds", "loss_max", "loss_nonfinite_steps", "grad_norm_nonfinite_steps")

    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        await store.migrate()
        with store.writer.engine.begin() as connection:
            for column in gone:
                connection.exec_driver_sql(f"ALTER TABLE samples ADD COLUMN {column}")
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0023'")
            own = {"run_id": 1, "boot_id": 1, "sequence": 1, "position": 0, "since_step": 0}
            connection.execute(runs.insert().values(id=1, name="r", first_seen=0.0, last_seen=0.0))
            connection.execute(boots.insert().values(id=1, run_id=1, rank=0, boot="b", last_seen=0.0))
            rows = [{**own, "step": bits, "nan_columns": bits} for bits in range(2 ** len(before))]
            connection.execute(samples.insert(), rows)
        await store.migrate()
        await store.check_schema()
        with store.reader.engine.begin() as connection:
            for row in connection.execute(select(samples)):
                were = {name for place, name in enumerate(before) if row.step >> place & 1}
                now = {name for name, value in unpack_scalars(row).items() if value is not None}
                assert now == were - {"loss_max"}
        await store.close()

    asyncio.run(look())
