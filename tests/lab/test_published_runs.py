"""The published runs give the tables of lab/NOTEBOOK.md, with no GPU: whoever moves a threshold moves the page."""

from pathlib import Path

import pytest

from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.scoring.score import score_traces
from foreshock.lab.scoring.table import Row, table
from foreshock.monitor.detect.detectors import Detectors

LAB = Path(__file__).parents[2] / "src/foreshock/lab"


def line(row: Row) -> str:
    """One row as the page has it."""

    def number(value: float | None, form: str = "{:,.0f}") -> str:
        return "-" if value is None else form.format(value)

    cells = (
        row.monitor,
        row.kind,
        f"{row.warned} of {row.failures}",
        f"{row.in_time} of {row.failures}",
        number(row.median_lead_steps),
        number(row.median_lead_to_dangerous_steps),
        str(row.false_alarms),
        number(row.upper_bound_per_10k, "{:.2f}"),
        f"{row.causes_right} of {row.causes}" if row.causes else "-",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_page_holds_what_the_published_runs_give() -> None:
    scores = score_traces(list(map(read_trace, sorted((LAB / "traces").glob("*.xz")))))
    assert len(scores) >= 40
    page = (LAB / "NOTEBOOK.md").read_text()
    for split in ("held-out", "tuning"):
        rows = [row for row in table(scores) if row.split == split and ":" not in row.monitor]
        _, _, after = page.partition(f"{split}, {rows[0].healthy_steps:,} healthy steps:")
        shown = after.lstrip().partition("\n\n")[0].splitlines()
        assert [row for row in shown if row in map(line, rows)] == list(map(line, rows))


def test_rounding_is_not_named_while_a_head_is_critical_whose_delta_bias_does_not_support_it_by_now() -> None:
    trace = read_trace(LAB / "traces" / "matrix" / "score-growth-by-Muon_qk_clip-start_seed4.trace.xz")
    detectors = Detectors(trace.heads)
    assert {verdict.cause for sample in readings(trace) for verdict in detectors.update(sample)} == {"score growth"}
