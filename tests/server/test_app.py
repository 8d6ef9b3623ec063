"""The service put together: it listens where it can, does its chores whatever fails, and says whether a batch can be
stored now."""

import asyncio
import re
import shutil
import signal
import socket
import sqlite3
import time
from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from foreshock.server import app as put_together
from foreshock.server.app import AddressError, Server, serve
from foreshock.server.settings import Settings
from foreshock.server.store.backup import examine
from foreshock.server.store.database import ClosingError, StoreError, give_up_if_cancelled, repeat, unusable
from foreshock.server.testing import LiveService


def test_an_address_that_cannot_be_listened_on_is_refused_before_the_store_is_made(tmp_path: Path) -> None:
    store = tmp_path / "new.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"port {port} of 127\.0\.0\.1 is used by another program; .*--port"):
            serve(Settings(database_url=f"sqlite:///{store}", port=port))
    assert not store.exists()


def test_a_damaged_store_is_told_with_its_file_and_the_way_back_to_a_backup(tmp_path: Path, empty_store: Path) -> None:
    """The sentence is read by whoever is woken: SQLite's own names neither the file nor what to do."""
    torn = tmp_path / "torn.db"
    pages = empty_store.read_bytes()
    torn.write_bytes(pages[:100] + b"\xff" * 400 + pages[500:])
    for ask in (put_together._open_once(Settings(database_url=f"sqlite:///{torn}")), examine(f"sqlite:///{torn}")):
        with pytest.raises(StoreError, match="malformed") as caught:
            asyncio.run(ask)
        assert str(torn) in str(caught.value)
        assert "foreshock store restore" in str(caught.value)


def test_a_store_that_another_program_holds_is_told_with_its_file_and_what_to_do(tmp_path: Path) -> None:
    held = f"sqlite:///{tmp_path}/held.db"
    with closing(sqlite3.connect(tmp_path / "held.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OperationalError) as met, create_engine(held, connect_args={"timeout": 0}).connect() as late:
            late.exec_driver_sql("CREATE TABLE runs (id)")
    assert re.search(r"is locked \(.*held\.db\); another program has locked it", str(unusable(met.value, held)))


@pytest.mark.parametrize(("migrate", "migrated"), [(None, True), (True, True), (False, False)])
def test_a_new_sqlite_store_is_migrated_unless_the_settings_say_no(
    tmp_path: Path, migrate: bool | None, migrated: bool
) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'new.db'}", migrate=migrate)
    if migrated:
        asyncio.run(put_together._open_once(settings))
    else:
        with pytest.raises(StoreError, match="start one service with FORESHOCK_MIGRATE=true"):
            asyncio.run(put_together._open_once(settings))


async def test_the_page_is_never_kept_and_its_assets_are_those_that_it_names(service: Any) -> None:
    page = await service.client.get("/")
    assert (page.status_code, page.headers["cache-control"]) == (200, "no-cache")
    assets = re.findall(r'"\.?/?(assets/[^"]+)"', page.text)
    assert len(assets) >= 2
    for asset in assets:
        assert (await service.client.get(f"/{asset}")).status_code == 200, asset
    for path in ("/", f"/{assets[0]}"):  # a file is sent whole, whatever range the request names
        parts = await service.client.get(path, headers={"range": "bytes=9-1"})
        whole = await service.client.get(path)
        assert (parts.status_code, parts.content) == (200, whole.content), path


def test_a_chore_that_fails_is_logged_and_tried_again_until_the_service_closes() -> None:
    went = [RuntimeError("lost"), OSError("gone"), ClosingError()]

    async def broken() -> None:
        raise went.pop(0)

    with capture_logs() as said:
        asyncio.run(asyncio.wait_for(repeat(broken, "a chore failed", 0.0, asyncio.Event()), 60))
    assert went == []
    assert [line["error"] for line in said] == ["lost", "gone"]
    assert {line["event"] for line in said} == {"a chore failed; the service tries again"}


Usage = namedtuple("Usage", "total used free")


async def readiness_of(service: Any) -> tuple[int, str]:
    service.app.state.readiness.same_answer_seconds = 0.0
    answer = await service.client.get("/readyz")
    return answer.status_code, answer.json()["checks"]["store"]


def test_a_load_balancer_may_ask_with_head_and_gets_what_get_says_without_the_body(live_service: LiveService) -> None:
    with live_service.client() as client:
        for path in ("/healthz", "/readyz", "/"):
            readiness_of, told = client.head(path), client.get(path)
            assert (readiness_of.status_code, readiness_of.content) == (200, b""), path
            assert readiness_of.headers["content-length"] == told.headers["content-length"] == str(len(told.content))


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
    assert await readiness_of(service) == (503, "its file is gone")


async def test_a_disk_with_no_room_for_a_batch_is_not_ready(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 4096))
    assert await readiness_of(service) == (503, "its disk is full")
    monkeypatch.undo()
    assert await readiness_of(service) == (200, "ok")


async def test_a_store_that_reads_but_takes_no_write_is_not_ready(service: Any) -> None:
    with service.app.state.store.writer.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER no BEFORE INSERT ON service_state BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    status, said = await readiness_of(service)
    assert (status, said) == (503, "IntegrityError")


async def test_a_writer_that_hangs_is_said_at_the_deadline_and_not_for_ever(service: Any) -> None:
    service.app.state.readiness.deadline_seconds = 0.3
    with service.app.state.store.writer.engine.begin():
        assert await readiness_of(service) == (503, "no write within 0 s")
    await asyncio.sleep(0)
    assert await readiness_of(service) == (200, "ok")


async def test_a_server_that_is_told_to_stop_ends_long_reads_and_at_once_when_it_is_told_again(service: Any) -> None:
    config = uvicorn.Config(service.app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
    server, store = Server(config, list[str]().append), service.app.state.store
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()

    def endless(connection: Connection) -> None:
        while True:
            give_up_if_cancelled(connection)
            time.sleep(0.01)

    read = asyncio.create_task(store.read(endless))
    await asyncio.sleep(0.2)
    for forced in (False, True):
        server.handle_exit(signal.SIGTERM, None)
        assert (server.should_exit, server.force_exit) == (True, forced)
    assert not read.done()
    await server.shutdown()
    with pytest.raises(ClosingError):
        await asyncio.wait_for(read, 30)
