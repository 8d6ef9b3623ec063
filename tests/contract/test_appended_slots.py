"""Slots can be appended: old agents, stores, traces, the reference and the kernels keep working without other edits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXISTING_TESTS = (
    "tests/contract/test_slots.py",
    "tests/contract/test_wire.py",
    "tests/contract/test_catalog.py",
    "tests/server/test_rolling_upgrade.py",
    "tests/kernels/test_statistics.py",
    "tests/kernels/test_triton_sampled_rows.py",
    "tests/monitor/test_samples.py",
    "tests/monitor/test_probe.py",
    "tests/lab/test_replay.py::test_replayed_run_and_its_warning_reach_the_service",
    "tests/lab/test_trace.py",
)


@pytest.mark.full
@pytest.mark.promise("S16")
def test_existing_tests_pass_with_three_appended_slots() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.appended.plugin"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    result = subprocess.run(
        [*command, *EXISTING_TESTS], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
