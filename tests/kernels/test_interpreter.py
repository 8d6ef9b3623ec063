"""Without a GPU, the Triton suite runs in Triton's interpreter, in processes that enable it at their start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = sorted(Path(__file__).parent.glob("test_triton_*.py"))
PARTS = {"attention": SUITE[:1], "cuda to launch": SUITE[1:5], "log-sum-exp to ties": SUITE[5:]}
"""Parts of similar duration. Each process imports PyTorch and Triton, which takes as long as the tests of a file."""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs on the GPU, in this process")
@pytest.mark.parametrize("part", PARTS)
def test_triton_suite_passes_in_the_interpreter(part: str) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier", "full"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [*command, *map(str, PARTS[part])], env=environment, capture_output=True, text=True, timeout=880, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
