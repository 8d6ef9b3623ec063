"""What every test of the agent begins with."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten() -> Iterator[None]:
    """Earlier tests would use up the limit of compilations of one code, past which PyTorch runs eagerly."""
    yield
    torch._dynamo.reset()
