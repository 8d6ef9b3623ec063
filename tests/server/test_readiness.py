"""/readyz says whether a batch can be stored now, and says so in time."""

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from foreshock.server.testing import LiveService

Usage = namedtuple("Usage", "total used free")


async def asked(service: Any) -> tuple[int, str]:
    service.app.state.readiness.same_answer_seconds = 0.0
    answer = await service.client.get("/readyz")
    return answer.status_code, answer.json()["checks"]["store"]


def test_a_load_balancer_may_ask_with_head_and_gets_what_get_says_without_the_body(live_service: LiveService) -> None:
    with live_service.client() as client:
        for path in ("/healthz", "/readyz", "/"):
            asked, told = client.head(path), client.get(path)
            assert (asked.status_code, asked.content) == (200, b""), path
            assert asked.headers["content-length"] == told.headers["content-length"] == str(len(told.content))


@pytest.mark.settings(token="a-secret-of-sixteen-or-more")
async def test_a_probe_needs_no_token_and_costs_one_write_a_second_however_many_ask(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    trying = service.app.state.readiness._tried

    async def counted() -> str:
        tried.append(1)
        found: str = await trying()
        return found

    monkeypatch.setattr(service.app.state.readiness, "_tried", counted)
    assert (await service.client.get("/v1/runs")).status_code == 401
    service.app.state.readiness.same_answer_seconds = 3600.0
    answers = await asyncio.gather(*(service.client.get("/readyz") for _ in range(50)))
    assert {(answer.status_code, answer.json()["checks"]["store"]) for answer in answers} == {(200, "ok")}
    assert len(tried) == 1


async def test_a_database_file_that_is_gone_is_not_ready(service: Any, tmp_path: Path) -> None:
    (tmp_path / "foreshock.db").rename(tmp_path / "elsewhere.db")
    assert await asked(service) == (503, "its file is gone")


async def test_a_disk_with_no_room_for_a_batch_is_not_ready(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 4096))
    assert await asked(service) == (503, "its disk is full")
    monkeypatch.undo()
    assert await asked(service) == (200, "ok")


async def test_a_store_that_reads_but_takes_no_write_is_not_ready(service: Any) -> None:
    with service.app.state.store.writer.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER no BEFORE INSERT ON service_state BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    status, said = await asked(service)
    assert (status, said) == (503, "IntegrityError")


async def test_a_writer_that_hangs_is_said_at_the_deadline_and_not_for_ever(service: Any) -> None:
    service.app.state.readiness.deadline_seconds = 0.3
    with service.app.state.store.writer.engine.begin():
        assert await asked(service) == (503, "no write within 0 s")
    await asyncio.sleep(0)
    assert await asked(service) == (200, "ok")
