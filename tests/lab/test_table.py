"""What scores add up to: thresholds from the healthy tuning runs alone; a lower one never warns later."""

from pathlib import Path

import pytest
from tests.lab.made_up import record

from foreshock.lab.scoring.table import calibrated, lab_score, row, table


def test_baselines_are_calibrated_on_the_healthy_runs_of_the_tuning_set_alone(tmp_path: Path) -> None:
    paths = [
        record(tmp_path / "a.jsonl.gz", fails=False, split="tuning"),
        record(tmp_path / "b.jsonl.gz", fails=False, seed=2),
        record(tmp_path / "c.jsonl.gz", fails=True, seed=2),
    ]
    scores, result = lab_score(paths)
    level = calibrated(scores, "largest score of the model")
    assert level is not None
    assert level == pytest.approx(12.0)
    rows = {(each.monitor, each.kind, each.split): each for each in table(scores)}
    assert rows["largest score of the model", "calibrated", "tuning"].false_alarms == 0
    held_out = rows["largest score of the model", "calibrated", "held-out"]
    assert (held_out.warned, held_out.false_alarms) == (1, 0)
    assert ("W_Q norm", "calibrated", "held-out") not in rows
    assert len(result["table"]) == len(rows)


def test_a_lower_threshold_never_warns_later(tmp_path: Path) -> None:
    scores, _ = lab_score([record(tmp_path / "f.jsonl.gz", fails=True), record(tmp_path / "h.jsonl.gz", fails=False)])
    for monitor in ("foreshock", "largest score of the model", "W_Q norm", "gradient-norm z-score"):
        if monitor not in scores[0].signals:
            continue
        leads = [row(scores, monitor, threshold, "swept", "").median_lead_steps or 0.0 for threshold in (0.2, 1, 13)]
        assert leads == sorted(leads, reverse=True)
