"""The detector benchmark: a healthy run, and one in which a whole layer is warned about."""

import json
from pathlib import Path

from typer.testing import CliRunner

from foreshock.benchmarks.detectors import HEADS, course, judged
from foreshock.cli.main import app


def warned(*, drifting: bool) -> set[tuple[int | None, int | None]]:
    """The heads that are warned about in the run."""
    played = judged(course(drifting=drifting, layers=2))
    return {(verdict.layer, verdict.head) for _, verdicts in played for verdict in verdicts}


def test_only_heads_of_the_drifting_layer_and_the_offset_level_are_warned_about() -> None:
    assert warned(drifting=False) == set()
    level_warning = (None, None)  # the offsets reach 160 nats, but stay below 100 in the healthy run
    assert warned(drifting=True) == {(0, head) for head in range(HEADS)} | {level_warning}


def test_bench_detectors_command_writes_the_cost_per_sample(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "detectors", "--passes", "1", "--json", str(tmp_path / "cost.json")])
    assert done.exit_code == 0, done.output
    costs = json.loads((tmp_path / "cost.json").read_text())
    assert costs["layers"] * costs["heads"] == 5120
    for name in ("healthy", "a layer drifts"):
        assert 0 < costs[name]["median"] <= costs[name]["mean"] <= costs[name]["largest"]
