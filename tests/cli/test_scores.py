"""What `foreshock lab score` prints: the numbers of its report, and a dash for what nobody can say."""

import dataclasses
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.typed import TRACE, foreshock

from foreshock.cli.output import cell
from foreshock.cli.research import scores
from foreshock.lab.scoring.synthetic import Row


@pytest.mark.parametrize("width", [80, 240])
def test_the_tables_are_those_of_the_report_in_a_terminal_of_any_width(width: int, tmp_path: Path) -> None:
    traces, out = [TRACE.with_name("key-bias_fa2_batch32.trace.xz"), TRACE], StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    scores.score(traces, console, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert [each["first_warning_step"] is None for each in report["traces"]] == [False, True]
    for each in report["traces"]:
        words = (each["trace"], each["truth"], each["steps"], each["first_warning_step"], each["layer"])
        assert [line for line in lines if line.startswith(" ".join(map(cell, words)))]
    for rows in (report["table"], report["healthy"], [report["precision"]], [report["forecasts"]]):
        for row in rows:
            assert " ".join(map(cell, row.values())) in lines
    assert "…" not in out.getvalue()
    assert f"report: {tmp_path / 'report.json'}" in out.getvalue().replace("\n", "")


def test_the_command_takes_recorded_runs_or_made_up_ones() -> None:
    assert foreshock("lab", "score").exit_code == 2
    assert foreshock("lab", "score", str(TRACE), "--synthetic").exit_code == 2


def test_the_rows_of_made_up_runs_are_printed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(family="one head", truth="failing", tuned=True, runs=3, warned=2, median_lead=40.0)
    monkeypatch.setattr("foreshock.lab.scoring.synthetic.score_synthetic", lambda: iter([row]))
    done = foreshock("lab", "score", "--synthetic", "--report", str(tmp_path / "rows.json"))
    assert done.exit_code == 0
    assert "one head failing True 3 2 0 40 - 0" in " ".join(done.output.split())
    assert json.loads((tmp_path / "rows.json").read_text()) == [dataclasses.asdict(row)]
