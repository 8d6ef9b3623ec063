"""Fixtures of the tests of dashboards."""

import threading
from collections.abc import Iterator

import pytest
from tests.dashboards.fake_grafana import FakeGrafana


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
