"""The whole service: its port, its store, its page, its chores, readiness and shutdown."""

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

from foreshock.server import app as service_app
from foreshock.server.app import AddressError, Server, serve
from foreshock.server.settings import Settings
from foreshock.server.store.backup import examine
from foreshock.server.store.database import ClosingError, StoreError, give_up_if_cancelled, repeat, unusable
from foreshock.server.testing import LiveService


def test_port_in_use_is_refused_before_store_is_created(tmp_path: Path) -> None:
    store = tmp_path / "new.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"port {port} of 127\.0\.0\.1 is used by another program; .*--port"):
            serve(Settings(database_url=f"sqlite:///{store}", port=port))
    assert not store.exists()


def test_error_for_damaged_store_names_file_and_restore_command(tmp_path: Path, empty_store: Path) -> None:
    """The message of SQLite itself names neither the file nor a remedy."""
    damaged = tmp_path / "torn.db"
    pages = empty_store.read_bytes()
    damaged.write_bytes(pages[:100] + b"\xff" * 400 + pages[500:])
    for opening in (
        service_app._open_once(Settings(database_url=f"sqlite:///{damaged}")),
        examine(f"sqlite:///{damaged}"),
    ):
        with pytest.raises(StoreError, match="malformed") as caught:
            asyncio.run(opening)
        assert str(damaged) in str(caught.value)
        assert "foreshock store restore" in str(caught.value)


def test_error_for_locked_store_names_file_and_cause(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/held.db"
    with closing(sqlite3.connect(tmp_path / "held.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with (
            pytest.raises(OperationalError) as raised,
            create_engine(url, connect_args={"timeout": 0}).connect() as blocked,
        ):
            blocked.exec_driver_sql("CREATE TABLE runs (id)")
    assert re.search(r"is locked \(.*held\.db\); another program has locked it", str(unusable(raised.value, url)))


@pytest.mark.parametrize(("migrate", "migrated"), [(None, True), (True, True), (False, False)])
def test_new_sqlite_store_is_migrated_unless_disabled(tmp_path: Path, migrate: bool | None, migrated: bool) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'new.db'}", migrate=migrate)
    if migrated:
        asyncio.run(service_app._open_once(settings))
    else:
        with pytest.raises(StoreError, match="start one service with FORESHOCK_MIGRATE=true"):
            asyncio.run(service_app._open_once(settings))


async def test_page_is_not_cached_its_assets_exist_and_invalid_range_gets_whole_file(service: Any) -> None:
    page = await service.client.get("/")
    assert (page.status_code, page.headers["cache-control"]) == (200, "no-cache")
    assets = re.findall(r'"\.?/?(assets/[^"]+)"', page.text)
    assert len(assets) >= 2
    for asset in assets:
        assert (await service.client.get(f"/{asset}")).status_code == 200, asset
    for path in ("/", f"/{assets[0]}"):  # an invalid range is ignored
        parts = await service.client.get(path, headers={"range": "bytes=9-1"})
        whole = await service.client.get(path)
        assert (parts.status_code, parts.content) == (200, whole.content), path


def test_failing_chore_is_logged_and_retried_until_service_closes() -> None:
    failures = [RuntimeError("lost"), OSError("gone"), ClosingError()]

    async def broken() -> None:
        raise failures.pop(0)

    with capture_logs() as logged:
        asyncio.run(asyncio.wait_for(repeat(broken, "a chore failed", 0.0, asyncio.Event()), 60))
    assert failures == []
    assert [line["error"] for line in logged] == ["lost", "gone"]
    assert {line["event"] for line in logged} == {"a chore failed; the service tries again"}


Usage = namedtuple("Usage", "total used free")


async def readiness_of(service: Any) -> tuple[int, str]:
    service.app.state.readiness.same_answer_seconds = 0.0
    response = await service.client.get("/readyz")
    return response.status_code, response.json()["checks"]["store"]


def test_head_request_returns_status_and_length_of_get_without_body(live_service: LiveService) -> None:
    with live_service.client() as client:
        for path in ("/healthz", "/readyz", "/"):
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))


@pytest.mark.settings(token="a-secret-of-sixteen-or-more")
async def test_readiness_probes_need_no_token_and_share_one_write(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []
    try_write = service.app.state.readiness._tried

    async def counted_write() -> str:
        writes.append(1)
        found: str = await try_write()
        return found

    monkeypatch.setattr(service.app.state.readiness, "_tried", counted_write)
    assert (await service.client.get("/v1/runs")).status_code == 401
    service.app.state.readiness.same_answer_seconds = 3600.0
    responses = await asyncio.gather(*(service.client.get("/readyz") for _ in range(50)))
    assert {(response.status_code, response.json()["checks"]["store"]) for response in responses} == {(200, "ok")}
    assert len(writes) == 1


async def test_missing_database_file_is_not_ready(service: Any, tmp_path: Path) -> None:
    (tmp_path / "foreshock.db").rename(tmp_path / "elsewhere.db")
    assert await readiness_of(service) == (503, "its file is gone")


async def test_full_disk_is_not_ready(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 4096))
    assert await readiness_of(service) == (503, "its disk is full")
    monkeypatch.undo()
    assert await readiness_of(service) == (200, "ok")


async def test_store_that_rejects_writes_is_not_ready(service: Any) -> None:
    with service.app.state.store.writer.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER no BEFORE INSERT ON service_state BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    status, check = await readiness_of(service)
    assert (status, check) == (503, "IntegrityError")


async def test_blocked_writer_is_not_ready_after_deadline_and_recovers(service: Any) -> None:
    service.app.state.readiness.deadline_seconds = 0.3
    with service.app.state.store.writer.engine.begin():
        assert await readiness_of(service) == (503, "no write within 0 s")
    await asyncio.sleep(0)
    assert await readiness_of(service) == (200, "ok")


async def test_sigterm_cancels_long_reads_and_second_sigterm_forces_exit(service: Any) -> None:
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
