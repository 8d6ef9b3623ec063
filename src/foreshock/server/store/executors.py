"""Reading and writing happen in threads of their own: neither holds up the other, nor the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine

T = TypeVar("T")
Work = Callable[[Connection], T]
"""Work on a connection, in one transaction."""
_CANCELLED: Final = "foreshock_cancelled"


class ClosingError(Exception):
    """The service goes down, and what was being read is given up."""


class Executor:
    """At most `threads` pieces of work at once, each with a connection of this engine, in threads of the executor."""

    def __init__(self, name: str, engine: Engine, threads: int) -> None:
        self.engine = engine
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"foreshock-{name}")
        self._cancelled = threading.Event()

    async def run(self, work: Work[T]) -> T:
        """Do the work; what it wrote stands when it returns. Raises ClosingError when the executor is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Work[T]) -> T:
        with self.engine.connect() as connection:
            connection.execution_options(**{_CANCELLED: self._cancelled})
            give_up_if_cancelled(connection)
            with connection.begin():
                return work(connection)

    def cancel(self) -> None:
        """Do no more, and give up what is under way where it calls `give_up_if_cancelled`."""
        self._cancelled.set()

    async def close(self) -> None:
        """Wait for what is under way, and close the connections."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self.engine.dispose()


def give_up_if_cancelled(connection: Connection) -> None:
    """Called again and again where much is read. Raises ClosingError when the executor was cancelled."""
    if connection.get_execution_options()[_CANCELLED].is_set():
        raise ClosingError
