"""Fixtures for tests of the service."""

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
from tests.overrides import settings_with
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
    """A service in the process of the test."""

    app: FastAPI
    client: httpx.AsyncClient

    async def post(
        self, batch: Batch, age: float | None = None, *, replayed: bool = False, secret: str = ""
    ) -> httpx.Response:
        """Send a batch. age: seconds since the process started; replayed: sent from a spool; secret: the token."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {secret}"} if secret else {})
        if age is not None:
            headers[AGE_HEADER] = str(age)
        if replayed:
            headers[REPLAYED_HEADER] = "true"
        return await self.client.post("/v1/batches", content=batch.model_dump_json(), headers=headers)

    async def store(self, rank: FakeRank, *events: Event, age: float | None = None, replayed: bool = False) -> Ack:
        """Send the next batch of a rank; fail the test if it is not stored."""
        response = await self.post(rank.batch(*events), age, replayed=replayed)
        assert response.status_code == 200, response.text
        return Ack.model_validate_json(response.content)

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON at a path; fail the test if the status is not 200."""
        response = await self.client.get(path, params=query)
        assert response.status_code == 200, response.text
        return response.json()


Scenario = Callable[[Service], Awaitable[None]]


class RunScenario(Protocol):
    """Run a scenario in a service with these settings."""

    def __call__(self, scenario: Scenario, name: str = "foreshock", **settings: Any) -> None:
        """Open a service on the store of this name, run the scenario, and close the service."""


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite store with the current schema. Copying it is faster than running the migrations."""
    path = tmp_path_factory.mktemp("store") / "empty.db"

    async def make() -> None:
        store = Store(f"sqlite:///{path}")
        await store.migrate()
        await store.close()

    asyncio.run(make())
    return path


@pytest.fixture
def run_scenario(tmp_path: Path, empty_store: Path) -> RunScenario:
    """A function that runs a scenario in a service on a new SQLite store."""

    def run(scenario: Scenario, name: str = "foreshock", **settings: Any) -> None:
        path = tmp_path / f"{name}.db"
        if not path.exists():
            shutil.copyfile(empty_store, path)
        asyncio.run(_run_scenario_at(f"sqlite:///{path}", scenario, **settings))

    return run


@pytest.fixture
def service(run_scenario: RunScenario) -> RunScenario:
    """The service of a test that is a coroutine, with the settings of `@pytest.mark.settings`."""
    return run_scenario


@pytest.fixture
def rank() -> FakeRank:
    """The only rank of a run."""
    return FakeRank()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine as the scenario of its service, or of both databases if it uses them."""
    test, fixtures = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: fixtures[name] for name in inspect.signature(test).parameters if name != "service"}
    run_scenario = cast(RunScenario | None, fixtures.get("both_databases", fixtures.get("service")))
    if run_scenario is None:
        asyncio.run(test(**arguments))
    else:
        mark = pyfuncitem.get_closest_marker("settings")
        run_scenario(lambda service: test(service=service, **arguments), **(mark.kwargs if mark else {}))
    return True


async def _run_scenario_at(database_url: str, scenario: Scenario, **settings: Any) -> None:
    app = create_app(settings_with(Settings, database_url=database_url, **{"metrics_seconds": 0.0, **settings}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client,
    ):
        await scenario(Service(app, client))


@pytest.fixture
def run_scenario_at() -> Callable[..., Awaitable[None]]:
    """`await run_scenario_at(database_url, scenario, **settings)`: run a scenario in a service on the given store."""
    return _run_scenario_at


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def both_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """`both_databases(scenario, **settings)`: run a scenario in a service on a new store of each kind."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None

    async def on_one(scenario: Scenario, settings: dict[str, Any]) -> None:
        url = f"sqlite:///{tmp_path}/new.db" if server is None else await new_database(server)
        await _run_scenario_at(url, scenario, migrate=True, **settings)

    return lambda scenario, **settings: asyncio.run(on_one(scenario, settings))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a new PostgreSQL on a free loopback port."""
    with started_postgres() as url:
        yield url
