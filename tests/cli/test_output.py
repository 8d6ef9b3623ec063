"""Output of commands: safe text, JSON, CSV, tables and closed pipes."""

import io
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from foreshock.cli import output


@given(st.text())
def test_control_characters_are_replaced_and_line_breaks_preserved(text: str) -> None:
    cleaned = output.shown(text)
    assert not any(ord(character) < 32 and character not in "\n\t" for character in cleaned)
    assert not set(cleaned) & set("\x7f\x1b\x9b\u202e\u2066")
    assert len(cleaned) == len(text)
    assert cleaned.count("\n") == text.count("\n")


@given(st.lists(st.floats() | st.none() | st.text(), max_size=5))
def test_printed_json_is_valid_with_null_for_non_finite_numbers(values: list[object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream := io.StringIO())
        output.print_json({"values": tuple(values)})
    expected = [None if isinstance(x, float) and not math.isfinite(x) else x for x in values]
    assert json.loads(stream.getvalue()) == {"values": expected}


def test_csv_has_a_header_and_empty_cells_for_none_and_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_csv(["a", "b", "c"], [[1, None, math.nan], ["x,y", 0.5, math.inf]])
    assert capsys.readouterr().out.splitlines() == ["a,b,c", "1,,", '"x,y",0.5,inf']


@pytest.mark.parametrize("width", [10, 30, 200])
def test_table_cells_are_not_truncated_at_any_terminal_width(width: int) -> None:
    table = Table("first column", "second column")
    table.add_row("0.123456789", "a sentence of five words")
    stream = io.StringIO()
    output.print_whole(table, Console(file=stream, width=width, force_terminal=False))
    for cell in ("first column", "second column", "0.123456789", "a sentence of five words"):
        assert cell in stream.getvalue()


PROGRAM = """
import typer
from foreshock.cli.errors import Commands
app = typer.Typer(cls=Commands)
@app.command()
def lines() -> None:
    for number in range({lines}):
        print(number)
@app.command()
def other() -> None:
    pass
app(["lines"])
"""


@pytest.mark.parametrize("lines", [2, 100_000])
def test_closed_output_pipe_is_not_an_error(lines: int) -> None:
    program = PROGRAM.format(lines=lines)
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    reader.wait()
    done = subprocess.run([sys.executable, "-P", "-c", program], stdout=reader.stdin, stderr=subprocess.PIPE, text=True)
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (0, "")
