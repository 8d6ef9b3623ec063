"""Fixtures of the service's tests."""

import asyncio
import inspect
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import httpx
import pytest
from fastapi import FastAPI
from tests.constants import settings_with
from tests.server.postgresql import new_database, started_postgres

from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER, Ack, Batch, Event
from foreshock.server.app import create_app
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store
from foreshock.server.testing import FakeRank, LiveService


@pytest.fixture
def live_service(tmp_path: Path) -> Iterator[LiveService]:
    """A real service without a token, on a free loopback port, with a new store."""
    with LiveService(tmp_path) as service:
        yield service


@dataclass
class Service:
    """A service within the test's own process."""

    app: FastAPI
    client: httpx.AsyncClient

    async def post(
        self, batch: Batch, age: float | None = None, *, replayed: bool = False, secret: str = ""
    ) -> httpx.Response:
        """Send a batch, of a process start so many seconds old, as itself or from its spool, with this token."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {secret}"} if secret else {})
        if age is not None:
            headers[AGE_HEADER] = str(age)
        if replayed:
            headers[REPLAYED_HEADER] = "true"
        return await self.client.post("/v1/batches", content=batch.model_dump_json(), headers=headers)

    async def store(self, rank: FakeRank, *events: Event, age: float | None = None, replayed: bool = False) -> Ack:
        """Send a rank's next batch, which must be stored."""
        answer = await self.post(rank.batch(*events), age, replayed=replayed)
        assert answer.status_code == 200, answer.text
        return Ack.model_validate_json(answer.content)

    async def get(self, path: str, **query: Any) -> Any:
        """The JSON at a path, which must be there."""
        answer = await self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


Story = Callable[[Service], Awaitable[None]]


class Play(Protocol):
    """Runs a story in a service with these settings."""

    def __call__(self, story: Story, name: str = "foreshock", **settings: Any) -> None:
        """Open the service on the store of this name, let the story happen, close it."""


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store of today's schema without a run. A copy is there sooner than the migrations that make one."""
    path = tmp_path_factory.mktemp("store") / "empty.db"

    async def make() -> None:
        store = Store(f"sqlite:///{path}")
        await store.migrate()
        await store.close()

    asyncio.run(make())
    return path


@pytest.fixture
def play(tmp_path: Path, empty_store: Path) -> Play:
    """A service within the process, on a new store; settings can be given."""

    def run(story: Story, name: str = "foreshock", **settings: Any) -> None:
        path = tmp_path / f"{name}.db"
        if not path.exists():
            shutil.copyfile(empty_store, path)
        asyncio.run(play_at(f"sqlite:///{path}", story, **settings))

    return run


@pytest.fixture
def service(play: Play) -> Play:
    """A service within the process, for a test that is a coroutine; `@pytest.mark.settings` gives it settings."""
    return play


@pytest.fixture
def rank() -> FakeRank:
    """The only rank of a run."""
    return FakeRank()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, with a service as its story; on stores of both kinds where it uses `on_both`."""
    test, found = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: found[name] for name in inspect.signature(test).parameters if name != "service"}
    play = cast(Play | None, found.get("on_both", found.get("service")))
    if play is None:
        asyncio.run(test(**given))
    else:
        mark = pyfuncitem.get_closest_marker("settings")
        play(lambda service: test(service=service, **given), **(mark.kwargs if mark else {}))
    return True


async def play_at(database_url: str, story: Story, **settings: Any) -> None:
    app = create_app(settings_with(Settings, database_url=database_url, **{"metrics_seconds": 0.0, **settings}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client,
    ):
        await story(Service(app, client))


@pytest.fixture
def player() -> Callable[..., Awaitable[None]]:
    """`await player(database_url, story, **settings)`: a service on a store of the test's choice."""
    return play_at


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def on_both(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """`on_both(story, **settings)`: a service on a new store of either kind."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None

    async def on_one(story: Story, settings: dict[str, Any]) -> None:
        url = f"sqlite:///{tmp_path}/new.db" if server is None else await new_database(server)
        await play_at(url, story, migrate=True, **settings)

    return lambda story, **settings: asyncio.run(on_one(story, settings))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a new PostgreSQL on a free loopback port."""
    with started_postgres() as url:
        yield url
