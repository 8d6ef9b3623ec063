"""What a sample of rows is worth: the formula, the recorded moments, and the table that the documentation shows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.lab import made_up

from foreshock.contract.slots import Slot, Words, identity_row
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.lab.scoring.power import failures, markdown, power, report, rows_needed, thin
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import DetectorConfig

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "results" / "power.json"


def test_the_rows_that_are_needed_give_what_is_asked_for_and_no_more() -> None:
    bias, steps, whole = 0.005, 4500, 5.6
    asked = DetectorConfig().support_z(16)
    rows = rows_needed(bias, 16, steps, whole)
    sampled = bias * math.sqrt(rows * steps)
    assert 1 / math.sqrt(1 / sampled**2 + 1 / whole**2) == pytest.approx(asked)
    assert rows_needed(bias, 144, steps, whole) > rows
    assert rows_needed(2 * bias, 16, steps, whole) == pytest.approx(rows / 4)
    assert rows_needed(bias, 16, steps, asked - 0.1) == math.inf


def test_a_sample_of_rows_keeps_their_share_of_ties_and_the_mean_of_their_bias() -> None:
    heads = 4000
    words = np.tile(identity_row(), (heads, 1))
    words[:, Slot.ROWS], words[:, Slot.TIED_ROWS_BF16] = 12_800, 3200
    floats = words.view(np.float64)
    floats[:, Slot.DELTA_BIAS_SUM], floats[:, Slot.DELTA_BIAS_SUMSQ] = 256.0, 12_800.0
    found = thin(words, np.full(heads, 4.0), np.random.default_rng(1))
    looked = found[:, Slot.ROWS] - found[:, Slot.SKIPPED_ROWS]
    assert (looked == 3200).all()
    share = found[:, Slot.TIED_ROWS_BF16] / looked
    assert share.mean() == pytest.approx(0.25, abs=0.005)
    assert share.std() == pytest.approx(np.sqrt(0.25 * 0.75 / 3200 * 0.75), rel=0.1)
    total = found.view(np.float64)[:, Slot.DELTA_BIAS_SUM] * 4
    spread = 12_800 - 256**2 / 12_800
    assert total.mean() == pytest.approx(256, abs=4 * np.sqrt(3 * spread / heads))
    assert total.std() == pytest.approx(np.sqrt(3 * spread), rel=0.1)
    assert (thin(words, np.ones(heads), np.random.default_rng(0)) == words).all()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """A healthy one and one that fails, of 20 rows a step, whose delta bias varies from row to row."""
    folder, words = tmp_path_factory.mktemp("power"), made_up.words

    def varied(offset: float, largest: float) -> Words:
        state = words(offset, largest)
        state.view(np.float64)[:, Slot.DELTA_BIAS_SUMSQ] = 1e-10
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_up, "words", varied)
        return [
            read_trace(made_up.record(folder / f"{name}.jsonl.gz", fails=name == "fails", split="tuning"))
            for name in ("healthy", "fails")
        ]


def test_a_run_that_did_not_fail_is_no_failure(runs: list[Trace]) -> None:
    assert [trace.path.name for trace, _ in failures(runs)] == ["fails.jsonl.gz"]
    with pytest.raises(ValueError, match="none of these runs failed by rounding"):
        power(runs[:1], seeds=1)


def test_the_fewer_rows_the_less_the_bias_is_worth_and_the_later_it_is_told(runs: list[Trace]) -> None:
    whole, few, more = power(runs, [0.02, 10.0], seeds=2)
    assert (whole.rows, whole.failures, whole.named, whole.in_time, whole.lag) == (None, 1, 1, 1, 0.0)
    assert (few.failures, more.failures, whole.healthy, more.healthy) == (2, 2, 1, 2)
    assert few.bias < 0.7 * more.bias
    assert few.in_time < more.in_time == 2


def test_the_tables_hold_every_figure(runs: list[Trace]) -> None:
    figures = report(runs, seeds=1)
    lines = markdown(figures).splitlines()
    assert len(lines) == 2 + len(figures["rows"]) + 1 + 4
    assert figures["bias"] == pytest.approx(1e-4 / 1000 / math.sqrt(1e-10 / 1000))


def test_the_documentation_shows_the_figures_of_the_command() -> None:
    page = (ROOT / "docs" / "detectors.md").read_text()
    assert markdown(json.loads(FIGURES.read_text())) in page


def test_at_the_defaults_a_failing_head_is_told_as_rounding_within_500_steps_of_a_count_of_every_row() -> None:
    defaults = AgentConfig.model_fields["probe_rows"].default, AgentConfig.model_fields["sample_every_steps"].default
    rows = defaults[0] / defaults[1]
    [row] = [row for row in json.loads(FIGURES.read_text())["rows"] if row["rows"] == rows]
    assert row["named"] == row["failures"]
    assert row["in_time"] >= 0.9 * row["failures"]
