"""What the tests of the sender share."""

import pytest

from foreshock.monitor.transport import sender


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender asks again after a twentieth of a second."""
    monkeypatch.setattr(sender, "retry_delay", lambda failures, retry_after: 0.05)
