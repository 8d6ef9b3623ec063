"""The database is opened, migrated, or refused in a sentence."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from tests.server.postgresql import new_database

from foreshock.server.runs.eventlog import write_events
from foreshock.server.store.database import Store, StoreError, _alembic_config
from foreshock.server.store.schema import events, runs


@pytest.mark.promise("S16")
def test_a_database_of_another_version_or_of_none_is_refused_with_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    async def look() -> None:
        store = Store(f"sqlite:///{tmp_path / 'x.db'}")
        with pytest.raises(StoreError, match="FORESHOCK_MIGRATE"):
            await store.check_schema()
        await store.migrate()
        early = r"schema 0012.*before the first release.*reads 0013.*FORESHOCK_DATABASE_URL"
        for schema, said in (("0012", early), ("9999", "newer foreshock")):
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
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def test_the_migration_numbers_the_events_of_each_run_in_the_order_in_which_they_were_stored(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    postgres = None if kind == "sqlite" else request.getfixturevalue("postgres")
    told = random.Random(3).choices(range(1, 6), weights=range(1, 6), k=500)  # the run of each event

    async def look() -> None:
        in_postgres = postgres and await new_database(postgres)
        store = Store(in_postgres or f"sqlite:///{tmp_path / 'x.db'}")
        await store.migrate()
        with store.writer.engine.begin() as connection:
            command.downgrade(_alembic_config(connection), "0013")
            seen = [{"id": i, "name": f"run-{i}", "first_seen": 1.0, "last_seen": 1.0} for i in range(1, 6)]
            connection.execute(insert(runs), seen)
            old = "INSERT INTO events (run_id, kind, unix_seconds, sentence) VALUES (:run, 'started', 1.0, 'a rank')"
            connection.execute(text(old), [{"run": run_id} for run_id in told])
            connection.execute(text("DELETE FROM events WHERE id % 7 = 0"))
        await store.migrate()
        await store.check_schema()
        row = {"kind": "started", "unix_seconds": 2.0, "sentence": "another rank"}
        with store.writer.engine.begin() as connection:
            write_events(connection, [{**row, "run_id": run_id} for run_id in (2, 5, 2)])
        kept = [run_id for place, run_id in enumerate(told, 1) if place % 7]
        count: Counter[int] = Counter()
        with store.reader.engine.begin() as connection:
            found = connection.execute(select(events.c.run_id, events.c.number).order_by(events.c.id)).all()
        assert [run_id for run_id, _ in found] == [*kept, 2, 5, 2]
        for run_id, number in found:
            count[run_id] += 1
            assert number == count[run_id]
        await store.close()

    asyncio.run(look())
