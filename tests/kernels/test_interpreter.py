"""Where there is no GPU, the Triton suite runs in Triton's interpreter, in a process that chose it from the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = sorted(Path(__file__).parent.glob("test_triton_*.py"))


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs on the GPU, in this process")
@pytest.mark.parametrize("part", SUITE, ids=[part.stem for part in SUITE])
def test_the_triton_kernels_pass_their_suite_in_the_interpreter(part: Path) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier", "full", str(part)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout or " skipped" in result.stdout
