"""The audit trail is append-only: the database itself refuses to change or delete a row."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from foreshock.server.testing import FakeRank

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
