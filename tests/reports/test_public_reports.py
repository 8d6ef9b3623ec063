"""Public bug reports, rebuilt: when foreshock speaks, and whether that helps. docs/evidence.md has the tables."""

import re
from pathlib import Path

import pytest
from tests.reports.public import REPORTS, SETS, Report, answer, row, summary
from tests.reports.settings import SETTINGS

EVIDENCE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
TABLE = [line for line in EVIDENCE.splitlines() if line.startswith("| [") and "https://github.com/" in line]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.address)
def test_a_report_is_answered_as_evidence_says_and_never_with_false_advice(report: Report) -> None:
    found = answer(report)
    assert row(report, found) in TABLE, (row(report, found), found.words)
    assert not re.search(report.false, found.words), found.words


def test_the_tables_hold_every_report_and_their_totals() -> None:
    assert len(TABLE) == len({report.address for report in REPORTS}) == len(REPORTS)
    assert SETTINGS.keys() == {report.address for report in REPORTS}
    for unseen in SETS:
        rows = [line for line, report in zip(TABLE, REPORTS, strict=True) if report.unseen == unseen]
        assert summary(rows) in EVIDENCE
