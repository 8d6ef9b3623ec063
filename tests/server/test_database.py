"""The database: migrations, refusal of other schemas, and deletion of old runs but nothing else."""

import time
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from structlog.testing import capture_logs

from foreshock.server.readings import unpack_scalars
from foreshock.server.store import audit
from foreshock.server.store.database import Store, StoreError
from foreshock.server.store.retention import Retention, delete_run
from foreshock.server.store.schema import boots, metadata, runs, samples
from foreshock.server.testing import FakeRank


@pytest.mark.promise("S16")
async def test_store_with_missing_or_unsupported_schema_is_refused_with_advice(
    tmp_path: Path,
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'x.db'}")
    with pytest.raises(StoreError, match="FORESHOCK_MIGRATE"):
        await store.check_schema()
    await store.migrate()
    early = r"schema 0020.*before the first release.*reads 0021.*FORESHOCK_DATABASE_URL"
    for schema, message in (("0020", early), ("9999", "newer foreshock")):
        with store.writer.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{schema}'")
        for use in (store.migrate, store.check_schema):
            with pytest.raises(StoreError, match=message):
                await use()
    await store.close()


@pytest.mark.parametrize("kind", ["folder", "text", "link"])
async def test_file_that_is_not_a_database_keeps_its_permissions(tmp_path: Path, kind: str) -> None:
    """A misspelt path may name a system file, and the service may run as root."""
    path, text_file = tmp_path / "x.db", tmp_path / "passwd"
    text_file.write_text("root:x:0:0\n")
    text_file.chmod(0o644)
    if kind == "folder":
        path.mkdir(0o755)
    else:
        path.symlink_to(text_file) if kind == "link" else text_file.rename(path)
    before = path.stat().st_mode

    store = Store(f"sqlite:///{path}")
    with pytest.raises(SQLAlchemyError):
        await store.migrate()
    await store.close()

    assert path.stat().st_mode == before


@pytest.mark.promise("S16")
async def test_migrations_create_exactly_the_tables_of_the_code(tmp_path: Path) -> None:
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


@pytest.mark.promise("S16")
async def test_nan_flags_survive_removal_of_other_columns(tmp_path: Path) -> None:
    """Each bit of `nan_columns` belongs to a column; in schema 0023 the second bit was that of the largest loss."""
    before = ("loss", "loss_max", "grad_norm", "learning_rate", "step_seconds", "agent_seconds")
    removed = ("unix_seconds", "loss_max", "loss_nonfinite_steps", "grad_norm_nonfinite_steps")

    store = Store(f"sqlite:///{tmp_path / 'x.db'}")
    await store.migrate()
    with store.writer.engine.begin() as connection:
        for column in removed:
            connection.exec_driver_sql(f"ALTER TABLE samples ADD COLUMN {column}")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0023'")
        common = {"run_id": 1, "boot_id": 1, "sequence": 1, "position": 0, "since_step": 0}
        connection.execute(runs.insert().values(id=1, name="r", first_seen=0.0, last_seen=0.0))
        connection.execute(boots.insert().values(id=1, run_id=1, rank=0, boot="b", last_seen=0.0))
        rows = [{**common, "step": bits, "nan_columns": bits} for bits in range(2 ** len(before))]
        connection.execute(samples.insert(), rows)
    await store.migrate()
    await store.check_schema()
    with store.reader.engine.begin() as connection:
        for row in connection.execute(select(samples)):
            nan_before = {name for place, name in enumerate(before) if row.step >> place & 1}
            nan_after = {name for name, value in unpack_scalars(row).items() if value is not None}
            assert nan_after == nan_before - {"loss_max"}
    await store.close()


async def test_old_runs_are_deleted_but_audit_trail_remains(service: Any) -> None:
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
async def test_temporary_forward_clock_jump_deletes_no_run(service: Any) -> None:
    for name in ("live", "silent"):
        rank = FakeRank(run=name)
        await service.store(rank, rank.started(), rank.sample(1))
    retention, day = Retention(service.app.state.store, 90 * 86_400.0), 86_400.0
    ahead = time.time() + 91 * day
    assert await retention.sweep(now=ahead, monotonic=0.0) == 0
    assert await retention.sweep(now=ahead, monotonic=14.0) == 0
    assert await retention.sweep(monotonic=24.0) == 0  # the clock is correct again
    assert await retention.sweep(now=ahead, monotonic=5000.0) == 0
    assert {run["run"] for run in (await service.get("/v1/runs"))["runs"]} == {"live", "silent"}


@pytest.mark.promise("S17")
async def test_old_runs_are_deleted_in_groups_and_logged_by_name(service: Any) -> None:
    for number in range(25):
        rank = FakeRank(run=f"run-{number:02}", layers=1)
        await service.store(rank, rank.started(), rank.sample(1))
    retention, ahead = Retention(service.app.state.store, 86_400.0), time.time() + 2 * 86_400.0
    with capture_logs() as logged:
        swept = [await retention.sweep(now=ahead, monotonic=at) for at in (0.0, 3000.0, 3600.0, 3610.0, 3620.0)]
    assert swept == [0, 0, 10, 10, 5]
    named = [name for line in logged if line["event"] == "old runs deleted" for name in line["runs"]]
    assert sorted(named) == [f"run-{number:02}" for number in range(25)]


@pytest.mark.promise("S17")
async def test_space_of_deleted_run_is_released_gradually(service: Any) -> None:
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
    assert await size() == full  # less space is free than the default reserve
    await store.give_back(kept=100)
    released_once = await size()
    assert full - 2100 < released_once < full - 2000
    await store.give_back(kept=100)
    assert await size() < empty + 200
    await service.store(FakeRank(), FakeRank().started())


ORDER = {"who": "ann", "mode": "exact_delta", "reason": "it drifts"}
CHANGES = ("UPDATE audit SET actor = 'eve'", "DELETE FROM audit WHERE sequence = 1", "DELETE FROM audit")


@pytest.mark.promise("S11")
@pytest.mark.usefixtures("both_databases")
async def test_audit_rows_cannot_be_updated_deleted_or_truncated(service: Any, rank: FakeRank) -> None:
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
