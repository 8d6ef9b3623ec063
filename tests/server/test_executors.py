"""Work beside the event loop: one transaction each, at most so many at once, given up when cancelled."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from foreshock.server.store.database import ClosingError, Executor, give_up_if_cancelled

INSERT, COUNT = text("INSERT INTO kept VALUES (1)"), text("SELECT COUNT(*) FROM kept")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{tmp_path}/executor.db")
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE kept (n INTEGER)"))
    yield made
    made.dispose()


def within(engine: Engine, threads: int, story: Callable[[Executor], Any]) -> None:
    async def told() -> None:
        executor = Executor("test", engine, threads)
        try:
            await story(executor)
        finally:
            await executor.close()

    asyncio.run(told())


def count(connection: Any) -> int:
    return int(connection.execute(COUNT).scalar_one())


def test_work_is_one_transaction_that_stands_whole_or_not_at_all(engine: Engine) -> None:
    def kept(connection: Any) -> int:
        connection.execute(INSERT)
        return count(connection)

    def broken(connection: Any) -> None:
        connection.execute(INSERT)
        raise LookupError("halfway")

    async def story(executor: Executor) -> None:
        assert await executor.run(kept) == 1
        with pytest.raises(LookupError, match="halfway"):
            await executor.run(broken)
        assert await executor.run(count) == 1

    within(engine, 1, story)


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_pieces_are_at_work_at_once_and_never_more(engine: Engine, threads: int) -> None:
    together = threading.Barrier(threads, timeout=60)  # breaks, and fails the test, where fewer come
    lock, now, most = threading.Lock(), [0], [0]

    def piece(connection: Any) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait()
        connection.execute(COUNT)
        with lock:
            now[0] -= 1

    async def story(executor: Executor) -> None:
        await asyncio.gather(*(executor.run(piece) for _ in range(4 * threads)))

    within(engine, threads, story)
    assert most == [threads]


def test_told_to_cancel_work_is_given_up_where_it_asks_and_none_is_begun(engine: Engine) -> None:
    begun, told = threading.Event(), threading.Event()

    def reads(connection: Any) -> None:
        connection.execute(INSERT)
        give_up_if_cancelled(connection)
        begun.set()
        assert told.wait(60)
        give_up_if_cancelled(connection)

    async def story(executor: Executor) -> None:
        reading = asyncio.ensure_future(executor.run(reads))
        assert await asyncio.to_thread(begun.wait, 60)
        executor.cancel()
        told.set()
        with pytest.raises(ClosingError):
            await reading
        with pytest.raises(ClosingError):
            await executor.run(count)

    within(engine, 1, story)
    with engine.begin() as connection:
        assert count(connection) == 0
