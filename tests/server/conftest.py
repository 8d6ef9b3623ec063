"""Fixtures of the service's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from foreshock.server.testing import LiveService


@pytest.fixture
def live_service(tmp_path: Path) -> Iterator[LiveService]:
    """A real service without a token, on a free loopback port, with a new store."""
    with LiveService(tmp_path) as service:
        yield service
