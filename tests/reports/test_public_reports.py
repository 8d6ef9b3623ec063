"""Rebuilt public bug reports: when foreshock warns, and whether the advice is right. Totals: docs/evidence.md."""

import csv
import re
from pathlib import Path

import pytest
from tests.reports.public import ANSWERS, HEADER, REPORTS, SETS, Report, answer, row, summary
from tests.reports.settings import SETTINGS

EVIDENCE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
FIRST_LINE, *TABLE = list(csv.reader(ANSWERS.read_text().splitlines()))


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(report, id=report.address, marks=[pytest.mark.full] * (n % 3 > 0))
        for n, report in enumerate(REPORTS)
    ],
)
def test_report_result_matches_the_table_without_false_advice(report: Report) -> None:
    result = answer(report)
    assert row(report, result) in TABLE, (row(report, result), result.words)
    assert not re.search(report.false, result.words), result.words


def test_table_has_every_report_and_docs_have_the_totals() -> None:
    assert FIRST_LINE == HEADER
    assert len(TABLE) == len({report.address for report in REPORTS}) == len(REPORTS)
    assert SETTINGS.keys() == {report.address for report in REPORTS}
    for unseen in SETS:
        rows = [line for line, report in zip(TABLE, REPORTS, strict=True) if report.unseen == unseen]
        assert summary(rows) in EVIDENCE
