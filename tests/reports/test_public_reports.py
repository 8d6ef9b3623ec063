"""Public bug reports, rebuilt: when foreshock speaks, and whether that helps. docs/evidence.md has the totals."""

import csv
import re
from pathlib import Path

import pytest
from tests.reports.public import ANSWERS, HEAD, REPORTS, SETS, Report, answer, row, summary
from tests.reports.settings import SETTINGS

EVIDENCE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
FIRST, *TABLE = list(csv.reader(ANSWERS.read_text().splitlines()))


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(report, id=report.address, marks=[pytest.mark.full] * (n % 3 > 0))
        for n, report in enumerate(REPORTS)
    ],
)
def test_a_report_is_answered_as_the_table_says_and_never_with_false_advice(report: Report) -> None:
    found = answer(report)
    assert row(report, found) in TABLE, (row(report, found), found.words)
    assert not re.search(report.false, found.words), found.words


def test_the_table_holds_every_report_and_the_page_its_totals() -> None:
    assert FIRST == HEAD
    assert len(TABLE) == len({report.address for report in REPORTS}) == len(REPORTS)
    assert SETTINGS.keys() == {report.address for report in REPORTS}
    for unseen in SETS:
        rows = [line for line, report in zip(TABLE, REPORTS, strict=True) if report.unseen == unseen]
        assert summary(rows) in EVIDENCE
