"""The ablation scores tuning runs alone, and says what a condition gives."""

from pathlib import Path

import pytest
from tests.lab.made_up import STEPS, record

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring import ablation as module
from foreshock.lab.scoring.ablation import VARIANTS, ablation
from foreshock.monitor.detect.detectors import DetectorConfig


def test_every_variant_is_a_configuration_that_differs_from_the_shipped_one() -> None:
    shipped = DetectorConfig()
    for name, fields in VARIANTS.items():
        assert set(fields) <= set(DetectorConfig.model_fields)
        varied = DetectorConfig(**fields)
        assert (varied == shipped) == (name == "as shipped")


def test_a_row_for_each_variant_counts_tuning_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("as shipped", "one block is enough", "without the score")
    deaf = {"deaf": {"offset_level": 1e8, "far_offset": 1e9, "score_level": 1e9, "tied_growth": 1e9}}
    monkeypatch.setattr(module, "VARIANTS", {name: VARIANTS[name] for name in chosen} | deaf)
    runs = [
        record(tmp_path / "f.jsonl.gz", fails=True, split="tuning"),
        record(tmp_path / "h.jsonl.gz", fails=False, split="tuning"),
        record(tmp_path / "drifts.jsonl.gz", fails=False, split="tuning", truth="rounding", arm="untreated", seed=2),
        record(tmp_path / "held-out.jsonl.gz", fails=False, seed=3),
    ]
    heard: list[str] = []
    rows = ablation(list(map(read_trace, runs)), heard.append)
    assert [each.variant for each in rows] == heard == [*chosen, "deaf"]
    for each in rows:
        assert (each.healthy_steps, each.healthy_runs, each.quiet_runs) == (STEPS, 1, 1)
        assert (each.failures, each.drifting, each.drifting_warned, each.false_alarms) == (1, 1, 0, 0)
    shipped, one_block, _, unheard = rows
    assert shipped.in_time == 1
    assert shipped.median_lead_steps is not None
    assert one_block.median_lead_steps is not None
    assert one_block.median_lead_steps >= shipped.median_lead_steps
    assert (unheard.warned, unheard.median_lead_steps) == (0, 0.0)
    with pytest.raises(ValueError, match="looks at no held-out run"):
        ablation([read_trace(runs[-1])])
