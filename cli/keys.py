"""The speed of what is played, under the viewer's hand: keys struck at the terminal meanwhile."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Final

from foreshock.lab.recording.pace import Pace

try:
    import select
    import termios
    import tty
except ImportError:  # Windows, whose terminal is read otherwise
    _TERMINAL = False
else:
    _TERMINAL = True

HINT: Final = "space pauses, + and - change the speed, e goes to the end"


def turn(pace: Pace, key: str) -> None:
    """What a key does; one that does nothing is let go by."""
    actions: dict[str, Callable[[], None]] = {
        " ": pace.pause,
        "+": lambda: pace.times(2.0),
        "=": lambda: pace.times(2.0),  # the same key without shift
        "-": lambda: pace.times(0.5),
        "e": pace.to_the_end,
    }
    if key in actions:
        actions[key]()


@contextmanager
def keys_turn(pace: Pace) -> Iterator[bool]:
    """Let each key turn the pace as it is struck, without Enter; whether that can be done here."""
    if not _TERMINAL or not sys.stdin.isatty():
        yield False
        return
    terminal, (leaves, leave) = sys.stdin.fileno(), os.pipe()
    before = termios.tcgetattr(terminal)
    reader = Thread(target=_read, args=(terminal, leaves, pace), daemon=True)
    tty.setcbreak(terminal)
    reader.start()
    try:
        yield True
    finally:
        os.close(leave)
        reader.join()
        os.close(leaves)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read(terminal: int, leaves: int, pace: Pace) -> None:
    while True:
        ready, _, _ = select.select([terminal, leaves], [], [])
        if leaves in ready or not (struck := os.read(terminal, 16)):
            return
        for key in struck.decode(errors="ignore"):
            turn(pace, key)
