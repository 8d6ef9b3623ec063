"""Every example runs as a person would run it, and the service sees its run from start to end."""

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
"""Stands for a program with torchtitan's Trainer, which needs a GPU."""


def walkthroughs() -> list[tuple[str, str]]:
    """Programs that docs/examples.md names, and the output that it shows of each."""
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    return re.findall(r"`python -P examples/(\w+\.py)`.*?```text\n(.*?)```", page, re.DOTALL)


def test_the_page_of_examples_shows_every_program() -> None:
    assert {name for name, _ in walkthroughs()} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize(
    ("example", "run", "more"),
    [
        pytest.param("plain_loop.py", "plain-loop", [], marks=pytest.mark.full),
        pytest.param("huggingface_trainer.py", "trainer", ["--output", "out"], marks=pytest.mark.full),
        pytest.param(TITAN, "titan", ["--output", "out"], marks=pytest.mark.full),
    ],
)
def test_an_example_trains_and_its_run_is_complete_at_the_service(
    example: str, run: str, more: list[str], tmp_path: Path
) -> None:
    with LiveService(tmp_path) as service:
        command = [sys.executable, "-P", str(EXAMPLES / example), "--url", service.url, "--steps", "25", *more]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "foreshock watches" in done.stderr
        if shown := [block for name, block in walkthroughs() if name == example]:
            # with a service the address of the run's page stands between them
            assert all(line in done.stderr for line in shown[0].splitlines())
        detail = httpx.get(f"{service.url}/v1/runs/{run}", timeout=10).json()
    assert detail["status"] == "completed"
    assert detail["last_step"] == 25
    assert [layer["heads"] for layer in detail["layers"]] == [[0, 1, 2, 3]] * 2
    assert detail["loss"] is not None
