"""What MLflow and Weights & Biases themselves have stored after a mirrored run, by their real client libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("tracked_run.py")

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_real_tracker_holds_each_sample_beside_what_the_program_logs_itself(tracker: str, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    found = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), tracker, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout.splitlines()[-1])
    assert told["faults"] == {}
    stored = {name: dict(map(tuple, points)) for name, points in told["stored"].items()}
    assert set(stored) == {
        "loss",
        "foreshock/max_attention_logit",
        "foreshock/attention_entropy",
        "foreshock/worst_score_offset",
        "foreshock/largest_score",
        "foreshock/active_warnings",
        "foreshock/switched_heads",
    }
    assert sorted(stored["loss"]) == list(range(6)), "the program's own steps are its own"
    steps = sorted(stored["foreshock/largest_score"])
    # wandb takes the newest numbers along with the program's next log; MLflow keeps every sample
    assert steps == list(range(1, 7)) if tracker == "mlflow" else set(steps) <= set(range(1, 7))
    assert steps[-1] == 6
    assert all(value > 0 for value in stored["foreshock/largest_score"].values())
    assert stored["foreshock/active_warnings"][6] == 0.0
    assert set(stored["foreshock/switched_heads"].values()) == {0.0}
    if tracker == "mlflow":
        assert list(stored["foreshock/active_warnings"].values()).count(1.0) >= 1
