"""Runs are grouped by what became of them."""

from pathlib import Path
from typing import Any

import pytest
from tests.lab.made_up import record

from foreshock.lab.scoring.incident_table import group_of, incident_rows
from foreshock.lab.scoring.table import lab_score


@pytest.mark.parametrize(
    ("header", "fails", "group"),
    [
        ({}, False, "healthy"),
        ({"truth": "rounding"}, False, "did not fail"),
        ({}, True, "failed"),
        ({"nature": "injected"}, True, "other"),
        ({"truth": "score growth"}, True, "other"),
        ({"truth": "healthy", "arm": "exact-delta"}, False, "treated"),
    ],
)
def test_runs_are_grouped_by_what_became_of_them(
    tmp_path: Path, header: dict[str, Any], fails: bool, group: str
) -> None:
    [score], result = lab_score([record(tmp_path / "run.jsonl.gz", fails=fails, **header)])
    assert group_of(score) == group
    [row] = incident_rows([score])
    assert (row.group, row.runs, row.quiet_runs) == (group, 1, 0 if fails else 1)
    assert (row.false_per_500k is None) == (group in ("failed", "other"))
    assert result["incidents"][0]["group"] == group
