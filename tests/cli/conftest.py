"""What the tests of the command line share: no settings from outside, and a service that knows one run."""

import os
from collections.abc import Iterator

import pytest

from foreshock.server.testing import FakeRank, LiveService


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORESHOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service that knows one run of two layers with three heads; each test changes runs of its own."""
    with LiveService(tmp_path_factory.mktemp("service")) as live:
        rank = FakeRank(run="run-1")
        live.post(rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=2.5)))
        yield live
