"""Fixtures of all tests of the agent."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    """Otherwise earlier tests would use up PyTorch's recompile limit, beyond which code runs eagerly."""
    yield
    torch._dynamo.reset()
