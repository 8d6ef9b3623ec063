"""Keys turn the pace, at a terminal of their own."""

import os
import pty
import sys
import termios
import time
from collections.abc import Iterator
from math import inf

import pytest

from foreshock.cli.keys import keys_turn, turn
from foreshock.lab.recording.pace import Pace


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A terminal as standard input: the side of the person who types, and the program's."""
    person, program = pty.openpty()
    with os.fdopen(program, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield person, program
    os.close(person)


def until(pace: Pace, speed: float) -> None:
    deadline = time.monotonic() + 60
    while pace.steps_per_second != speed:
        assert time.monotonic() < deadline, f"{pace.steps_per_second} steps a second, not {speed}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("struck", "speed"), [("+", 20.0), ("=", 20.0), ("-", 5.0), (" ", 0.0), ("  ", 10.0), ("e", inf), ("x\x1b[A", 10.0)]
)
def test_each_key_does_what_the_hint_says_and_others_nothing(struck: str, speed: float) -> None:
    pace = Pace(10.0)
    for key in struck:
        turn(pace, key)
    assert pace.steps_per_second == speed


def test_a_key_acts_as_it_is_struck_and_the_terminal_is_left_as_it_was(terminal: tuple[int, int]) -> None:
    person, program = terminal
    pace, before = Pace(10.0), termios.tcgetattr(program)
    with keys_turn(pace) as readable:
        assert readable
        os.write(person, b"+")
        until(pace, 20.0)
        os.write(person, b"e")
        until(pace, inf)
    assert termios.tcgetattr(program) == before


def test_where_nobody_sits_at_a_terminal_no_key_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with keys_turn(Pace(10.0)) as readable:
            assert not readable
