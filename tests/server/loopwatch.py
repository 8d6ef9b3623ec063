"""How long the event loop is held: processor seconds of its thread, so that other processes change nothing."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Held:
    """The longest that one callback held the event loop."""

    longest_seconds: float = 0.0


@contextmanager
def watched_loop() -> Iterator[Held]:
    """Watch every callback of the loops that run within this block, other threads' too. Not for uvloop."""
    held = Held()
    plain = asyncio.events.Handle._run

    def timed(self: asyncio.events.Handle) -> None:
        if self._loop is not loop:
            return plain(self)
        began = time.thread_time()
        plain(self)
        held.longest_seconds = max(held.longest_seconds, time.thread_time() - began)

    loop = asyncio.get_running_loop()
    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield held
    finally:
        asyncio.events.Handle._run = plain  # type: ignore[method-assign]
