"""A reader of a pipe that has read enough ends a command quietly."""

import subprocess
import sys

import pytest

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
def test_a_reader_that_has_read_enough_is_no_error(lines: int) -> None:
    program = PROGRAM.format(lines=lines)
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    reader.wait()
    done = subprocess.run([sys.executable, "-P", "-c", program], stdout=reader.stdin, stderr=subprocess.PIPE, text=True)
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (0, "")
