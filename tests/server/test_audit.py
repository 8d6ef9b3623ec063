"""The audit trail is append-only: the database itself refuses to change or delete a row."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError
from tests.server.golden_store import answers, store_at

from foreshock.server.testing import FakeRank

ORDER = {"who": "ann", "mode": "exact_delta", "reason": "it drifts"}
CHANGES = ("UPDATE audit SET actor = 'eve'", "DELETE FROM audit WHERE sequence = 1", "DELETE FROM audit")

pytestmark = pytest.mark.promise("S11")


async def refuses_changes(service: Any) -> None:
    before = await service.get("/v1/audit")
    assert before["rows"]
    engine = service.app.state.store.writer.engine
    for change in (*CHANGES, *(("TRUNCATE audit",) if engine.dialect.name == "postgresql" else ())):
        with pytest.raises(DBAPIError, match="append-only"), engine.begin() as connection:
            connection.exec_driver_sql(change)
    assert await service.get("/v1/audit") == before


async def story(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1))
    for _ in range(3):
        assert (await service.client.post("/v1/runs/run-1/commands", json=ORDER)).status_code == 201
    await refuses_changes(service)


def test_no_row_of_a_new_store_can_be_changed_deleted_or_truncated(on_both: Callable[..., None]) -> None:
    on_both(story)


@pytest.mark.promise("S16")
def test_an_older_store_keeps_its_rows_and_its_database_refuses_changes_from_then_on(
    tmp_path: Path, player: Any
) -> None:
    store_at(tmp_path / "old.db")
    [old] = [answer for address, answer in answers().items() if address.startswith("/v1/audit?")]

    async def look(service: Any) -> None:
        rows = (await service.get("/v1/audit", limit=500))["rows"]
        hashes = {"hash", "previous_hash"}
        assert rows == [{name: row[name] for name in row.keys() - hashes} for row in old["rows"]]
        await refuses_changes(service)

    asyncio.run(player(f"sqlite:///{tmp_path}/old.db", look))
