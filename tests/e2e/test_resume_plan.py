"""A failed run resumes from the printed plan and stays healthy, with each trainer."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.typed import foreshock
from tests.e2e.failing_trainings import END

from foreshock.server.testing import LiveService

PROGRAM = Path(__file__).with_name("failing_trainings.py")


PAPER = {"FORESHOCK_ATTENTION": "kernels", "FORESHOCK_NUMERICS": "paper", "FORESHOCK_SAMPLE_EVERY_STEPS": "10"}


Train = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained() -> Iterator[Train]:
    """Runs a training that samples every fifth step; returns its exit status and results."""
    deterministic = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-P", str(PROGRAM)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | deterministic
    ) as program:

        def train(trainer: str, folder: Path, url: str, *lines: str, **settings: str) -> tuple[int, dict[str, Any]]:
            environment = {
                "FORESHOCK_URL": url,
                "FORESHOCK_SAMPLE_EVERY_STEPS": "5",
            }
            environment |= {"XDG_CACHE_HOME": str(folder / "cache")} | settings
            request = {
                "trainer": trainer,
                "folder": str(folder),
                "run": "fell",
                "lines": lines,
                "environment": environment,
            }
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(json.dumps(request) + "\n")
            program.stdin.flush()
            status = int(program.stdout.readline())
            assert status in (0, -signal.SIGKILL), (folder / "log").read_text()[-5000:]
            return status, json.loads((folder / "end.json").read_text())

        try:
            yield train
        finally:
            program.kill()


@pytest.mark.full
@pytest.mark.promise("A32")
@pytest.mark.parametrize(
    "trainer",
    [
        "transformers",
        "lightning",
        "accelerate",
        "torchtitan",
        pytest.param(
            "torchtitan_itself",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan 0.3: pip install '.[zoo]'"
            ),
        ),
        "own",
    ],
)
def test_exploded_run_resumes_from_the_printed_plan_and_stays_healthy(
    trainer: str, trained: Train, tmp_path: Path
) -> None:
    (folder := tmp_path / "out").mkdir()
    with LiveService(tmp_path) as service:
        killed, fallen = trained(trainer, folder, service.url)
        assert killed == -signal.SIGKILL
        assert fallen["score"] > 512
        plan = json.loads(foreshock("resume-plan", "fell", "--json", "--url", service.url).output)
        checkpoint = plan["checkpoint"]
        assert (checkpoint["label"], checkpoint["pinned"], checkpoint["trainer"]) == (
            "clean",
            True,
            trainer.removesuffix("_itself"),
        )
        assert "clean" not in {one["label"] for one in plan["checkpoints"] if one["step"] > checkpoint["step"]}
        assert any(one["requested"] for one in plan["checkpoints"])
        ended, resumed = trained(trainer, folder, service.url, *plan["commands"])
        incidents = json.loads(foreshock("incidents", "fell", "--json", "--url", service.url).output)
    assert (ended, resumed["first"], resumed["last"]) == (0, checkpoint["step"], END)
    assert resumed["score"] < 512
    assert resumed["loss"] < fallen["loss"] - 0.1
    assert [one["sentence"] for one in incidents if one["state"] != "closed" and one["severity"] == "critical"] == []


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.promise("A32")
def test_run_drifting_by_rounding_resumes_with_row_correction_and_does_not_drift(
    trained: Train, tmp_path: Path
) -> None:
    """500 steps after the kill, the offset is below its value at the kill; untreated, it would be a third larger."""
    (folder := tmp_path / "out").mkdir()
    with LiveService(tmp_path) as service:
        killed, fallen = trained("rounding", folder, service.url, **PAPER)
        assert killed == -signal.SIGKILL
        plan = json.loads(foreshock("resume-plan", "fell", "--json", "--url", service.url).output)
        [incident] = json.loads(foreshock("incidents", "fell", "--json", "--url", service.url).output)
        assert (incident["cause"], incident["state"], plan["checkpoint"]["label"]) == ("rounding", "open", "clean")
        assert 'agent.set_mode(agent.modes(), "row_corrected"' in plan["commands"][-1]
        ended, resumed = trained("rounding", folder, service.url, *plan["commands"], **PAPER)
    assert (ended, resumed["first"]) == (0, plan["checkpoint"]["step"])
    assert resumed["first"] < fallen["last"] < resumed["last"]
    assert resumed["score"] < fallen["score"]
    assert resumed["offset"] < 2 / 3 * fallen["offset"]
