"""Fixtures for the command-line tests: a clean environment, and a service with one run."""

import os
from collections.abc import Iterator

import pytest

from foreshock.server.testing import FakeRank, LiveService


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORESHOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service with one run of two layers with three heads. Each test must change only runs that it adds."""
    with LiveService(tmp_path_factory.mktemp("service")) as live:
        rank = FakeRank(run="run-1")
        live.post(rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=2.5)))
        yield live
