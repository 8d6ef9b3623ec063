"""Every example runs from the command line, and the service records its run from start to end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from foreshock.server.testing import LiveService

EXAMPLES = Path(__file__).parents[2] / "examples"
TITAN = "../tests/monitor/titan_shape.py"
"""Replaces a program with torchtitan's Trainer, which needs a GPU."""


def walkthroughs() -> list[tuple[str, str]]:
    """Each program in docs/examples.md with the output shown for it."""
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    return re.findall(r"`python -P examples/(\w+\.py)`.*?```text\n(.*?)```", page, re.DOTALL)


def test_examples_page_shows_every_program() -> None:
    assert {name for name, _ in walkthroughs()} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize(
    ("example", "run", "arguments"),
    [
        pytest.param("plain_loop.py", "plain-loop", [], marks=pytest.mark.full),
        pytest.param("huggingface_trainer.py", "trainer", ["--output", "out"], marks=pytest.mark.full),
        pytest.param(TITAN, "titan", ["--output", "out"], marks=pytest.mark.full),
    ],
)
def test_example_trains_and_the_service_has_the_complete_run(
    example: str, run: str, arguments: list[str], tmp_path: Path
) -> None:
    with LiveService(tmp_path) as service:
        command = [sys.executable, "-P", str(EXAMPLES / example), "--url", service.url, "--steps", "25", *arguments]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "foreshock watches" in done.stderr
        if output := [block for name, block in walkthroughs() if name == example]:
            # with a service, the address of the run's page is printed between these lines
            assert all(line in done.stderr for line in output[0].splitlines())
        detail = httpx.get(f"{service.url}/v1/runs/{run}", timeout=10).json()
    assert detail["status"] == "completed"
    assert detail["last_step"] == 25
    assert [layer["heads"] for layer in detail["layers"]] == [[0, 1, 2, 3]] * 2
    assert detail["loss"] is not None
