"""Public bug reports, rebuilt: when foreshock speaks, and whether that helps. docs/evidence.md has the table."""

import re
from pathlib import Path

import pytest
from tests.reports.public import HELD_OUT, REPORTS, Report, answer, judged, row, summary

EVIDENCE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
TABLE = [line for line in EVIDENCE.splitlines() if line.startswith("| [") and "https://github.com/" in line]


@pytest.mark.parametrize("report", [*REPORTS, *HELD_OUT], ids=lambda report: report.address)
def test_a_report_is_answered_as_evidence_says_and_never_with_false_advice(report: Report) -> None:
    found = answer(report)
    assert row(report, found) in TABLE, (row(report, found), found.words)
    assert not re.search(report.false, found.words), found.words


def test_the_tables_hold_every_report_and_their_totals() -> None:
    assert len(TABLE) == len({report.address for report in (*REPORTS, *HELD_OUT)}) == len(REPORTS) + len(HELD_OUT)
    assert len(REPORTS) >= 20
    for lines in (TABLE[: len(REPORTS)], TABLE[len(REPORTS) :]):
        assert summary(judged(lines)) in EVIDENCE.replace("\n", " ")
