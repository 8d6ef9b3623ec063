"""Fixtures for the tests of the sender."""

import pytest

from foreshock.monitor.transport import sender


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender retries after 0.05 s."""
    monkeypatch.setattr(sender, "retry_delay", lambda failures, retry_after: 0.05)
