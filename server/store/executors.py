"""Reading and writing happen beside the event loop, in threads of their own: neither holds up the other, nor a request.

What runs there is a coroutine that awaits its connection and nothing else. On SQLite it runs through in one go, so that
a busy event loop delays it once and not at every statement. PostgreSQL's driver needs an event loop: there each
executor is a thread with one of its own.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Dialect, Engine, Row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")
Work = Callable[[AsyncConnection], Coroutine[Any, Any, T]]
"""Work on a connection, which awaits nothing else."""


class ClosingError(Exception):
    """The service goes down, and what was being read is given up."""


class ThreadExecutor:
    """At most so many pieces of work at once, each with a connection of this engine, in threads of the executor."""

    def __init__(self, name: str, engine: Engine, threads: int, *, write: bool = False) -> None:
        self._engine, self._write = engine, write
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"foreshock-{name}")
        self._cancelled = threading.Event()

    async def run(self, work: Work[T]) -> T:
        """Do the work. Raises ClosingError when the executor is cancelled meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Work[T]) -> T:
        with self._engine.connect() as connection:
            connection.execution_options(foreshock_write=self._write)
            with connection.begin():
                working = work(cast(AsyncConnection, _Immediate(connection, self._cancelled)))
                try:
                    working.send(None)
                except StopIteration as done:
                    found: T = done.value
                    return found
                working.close()
                raise RuntimeError("work on the store waited for something else than its connection")

    def cancel(self) -> None:
        """Give up what is under way, at its next statement or row."""
        self._cancelled.set()

    async def close(self) -> None:
        """Wait for what is under way, and close the connections."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._engine.dispose()


class LoopExecutor:
    """A thread with an event loop of its own, which does at most so many pieces of work at once."""

    def __init__(self, name: str, engine: AsyncEngine, at_once: int, *, write: bool = False) -> None:
        self._name, self._engine, self._write = name, engine, write
        self._at_once = asyncio.Semaphore(at_once)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._cancelled = False
        self._started: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None

    async def run(self, work: Work[T]) -> T:
        """Do the work. Raises ClosingError when the executor is cancelled meanwhile."""
        if self._started is None:
            loop = asyncio.new_event_loop()
            self._started = loop, threading.Thread(target=loop.run_forever, name=f"foreshock-{self._name}", daemon=True)
            self._started[1].start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(work), self._started[0]))

    async def _run(self, work: Work[T]) -> T:
        if self._cancelled:
            raise ClosingError
        if (task := asyncio.current_task()) is not None:
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        try:
            async with self._at_once, self._engine.connect() as connection:
                if not self._write:
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                async with connection.begin():
                    return await work(connection)
        except asyncio.CancelledError:
            if self._cancelled:
                raise ClosingError from None
            raise

    def cancel(self) -> None:
        """Give up what is under way, where it waits next."""
        self._cancelled = True
        if self._started is not None:
            self._started[0].call_soon_threadsafe(lambda: [task.cancel() for task in self._under_way])

    async def close(self) -> None:
        """Give up what is under way, and close the connections."""
        self.cancel()
        if self._started is None:
            return
        loop, thread = self._started
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), loop))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()

    async def _end(self) -> None:
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._engine.dispose()


class _Immediate:
    """The face of an AsyncConnection whose answers are there at once."""

    def __init__(self, connection: Connection, cancelled: threading.Event) -> None:
        self._connection, self._cancelled = connection, cancelled

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute in the calling thread."""
        if self._cancelled.is_set():
            raise ClosingError
        return self._connection.execute(statement, parameters)

    @property
    def dialect(self) -> Dialect:
        """Of the database."""
        return self._connection.dialect

    async def exec_driver_sql(self, statement: str, parameters: Any) -> Any:
        """Execute the driver's own words in the calling thread."""
        if self._cancelled.is_set():
            raise ClosingError
        return self._connection.exec_driver_sql(statement, parameters)

    @asynccontextmanager
    async def stream(self, statement: Any) -> AsyncIterator[AsyncIterator[Row[Any]]]:
        """The rows of a query, some at a time."""
        with self._connection.execute(statement) as rows:
            yield self._each(rows)

    async def _each(self, rows: Iterable[Row[Any]]) -> AsyncIterator[Row[Any]]:
        for row in rows:
            if self._cancelled.is_set():
                raise ClosingError
            yield row
