"""How long the event loop is held: processor seconds of its thread, so that other processes change nothing."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Held:
    """The longest that one callback held the event loop."""

    longest_seconds: float = 0.0
    process_seconds: float = 0.0
    """Processor time of the whole process within the block, other threads' too."""

    @property
    def part(self) -> float:
        """The first as a part of the second; to be read at once, as the callback that is under way still counts."""
        return self.longest_seconds / self.process_seconds


@contextmanager
def watched_loop() -> Iterator[Held]:
    """Watch every callback of this thread's loop within the block. Not for uvloop."""
    held = Held()
    plain = asyncio.events.Handle._run

    def timed(self: asyncio.events.Handle) -> None:
        began = time.thread_time()
        plain(self)
        if threading.current_thread() is own:
            held.longest_seconds = max(held.longest_seconds, time.thread_time() - began)

    own = threading.current_thread()
    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    gc.collect()
    gc.disable()  # what other tests left would be collected in somebody's callback
    spent = time.process_time()
    try:
        yield held
    finally:
        held.process_seconds = time.process_time() - spent
        gc.enable()
        asyncio.events.Handle._run = plain  # type: ignore[method-assign]
