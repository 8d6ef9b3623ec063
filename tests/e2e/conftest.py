"""Fixtures for tests with real servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.running import Start, starter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program that listens on `port` and wait until `ready` returns 200; stopped after the test."""
    with starter(tmp_path) as run:
        yield run
