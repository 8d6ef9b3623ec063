"""The benchmark of the detectors times what it says: a quiet course, and one in which a whole layer is warned about."""

import json
from pathlib import Path

from typer.testing import CliRunner

from foreshock.benchmarks.detectors import HEADS, course, judged
from foreshock.cli.main import app


def warned(*, drifting: bool) -> set[tuple[int | None, int | None]]:
    """The heads that were warned about in a course."""
    played = judged(course(drifting=drifting, layers=2))
    return {(verdict.layer, verdict.head) for _, verdicts in played for verdict in verdicts}


def test_healthy_heads_are_not_warned_about_and_every_head_of_the_layer_that_drifts_is() -> None:
    assert warned(drifting=False) == set()
    of_levels = (None, None)  # the offsets come to 160 nats, and none of a healthy run to 100
    assert warned(drifting=True) == {(0, head) for head in range(HEADS)} | {of_levels}


def test_the_command_writes_what_a_sample_costs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "detectors", "--passes", "1", "--json", str(tmp_path / "cost.json")])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "cost.json").read_text())
    assert written["layers"] * written["heads"] == 5120
    for name in ("healthy", "a layer drifts"):
        assert 0 < written[name]["median"] <= written[name]["mean"] <= written[name]["largest"]
