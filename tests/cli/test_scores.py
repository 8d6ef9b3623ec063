"""What `foreshock lab score` prints: the numbers of its report, and a dash for what nobody can say."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.cli.typed import TRACE

from foreshock.cli.research import scores


def wide() -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=240, force_terminal=False), out


def columns(text: str, title: str) -> list[str]:
    """The words of the line that begins with `title`."""
    return next(line for line in text.splitlines() if line.startswith(title)).split()


def test_the_tables_are_those_of_the_report(tmp_path: Path) -> None:
    failing = TRACE.with_name("key-bias_fa2_batch32.trace.xz")
    console, out = wide()
    scores.score([failing, TRACE], console, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    told = {each["trace"]: each for each in report["traces"]}
    for name, each in told.items():
        line = columns(out.getvalue(), f"{name} ")
        assert line[1:4] == [each["truth"], str(each["steps"]), scores.cell(each["first_warning_step"])]
    assert f"report: {tmp_path / 'report.json'}" in out.getvalue().replace("\n", "")
    assert told["key-bias_fa2_batch32"]["first_warning_step"] is not None
    for monitor in report["table"]:
        name = monitor["monitor"]
        rest = next(line for line in out.getvalue().splitlines() if line.startswith(name))[len(name) :].split()
        assert rest[0] == scores.cell(monitor["threshold"])
        assert rest[1:4] == [str(monitor["warned"]), "of", str(monitor["dangerous"])]
    assert f"all {report['healthy'][-1]['runs']}" in " ".join(columns(out.getvalue(), "all "))
    assert f"Of {report['precision']['warned_as_rounding']} observed runs" in out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_and_no_column_is_cut_in_a_terminal_that_is_narrower_than_the_table(width: int) -> None:
    told, whole = StringIO(), wide()
    scores.score([TRACE], Console(file=told, width=width, force_terminal=False), report=None)
    scores.score([TRACE], whole[0], report=None)
    assert "…" not in told.getvalue()
    assert "quality loss" in told.getvalue()
    assert set(whole[1].getvalue().split()) <= set(told.getvalue().split())


@given(value=st.none() | st.floats(-1e300, 1e300) | st.integers() | st.text(max_size=5))
def test_a_cell_is_a_dash_four_digits_or_what_it_is(value: Any) -> None:
    told = scores.cell(value)
    if value is None:
        assert told == "-"
    elif isinstance(value, float):
        assert float(told) == pytest.approx(value, rel=1e-3, abs=1e-300)
        assert len(told) <= 11
    else:
        assert told == str(value)
