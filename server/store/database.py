"""The database: one engine, one writer at a time, migrations shipped in the package.

SQLite runs in WAL mode with synchronous=FULL: what is committed survives a kill and a power cut. PostgreSQL is chosen
by URL and may be shared by several replicas of the service.
"""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, Table, create_engine, event, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from foreshock.server.store.executors import LoopExecutor, ThreadExecutor, Work
from foreshock.server.store.schema import metadata, runs

_EVENTS_LOCK: Final = 0x666F7265  # any fixed number; the same in every replica
_MIGRATION_LOCK: Final = _EVENTS_LOCK + 1
_LOOKS: Final = 2
"""Reads of many rows at work at once, of those that nobody can multiply: scrapes, roll-ups."""
_HEAVY_READS: Final = 2
"""Large reads at work at once; each may hold a few hundred MiB, and takes a processor from whoever writes."""
_HEAVY_WAITING: Final = 64
"""Large reads that wait or work; beyond, they are told to come back."""
_CACHE_KIB: Final = 8192
"""Pages that a connection to SQLite keeps. Each keeps its own; the system's cache serves all of them."""
_WAL_PAGES: Final = 4000
"""Pages of 4 KiB after which the log is copied into the file: rarely, since the commit that does it waits."""
_FREE_PAGES: Final = 4096
"""Pages that stay in the file after a deletion; what lies beyond goes back to the disk."""
_PAGES_AT_ONCE: Final = 2048
"""Of those at once, while ingest waits: some hundredths of a second."""
BESIDE: Final = ("", "-wal", "-shm")
"""What SQLite keeps of one database: the file, its write-ahead log, and the index of that."""
T = TypeVar("T")


class StoreError(ValueError):
    """The store cannot be used as it is; the message says what to do."""


class BusyError(Exception):
    """More large reads wait than the store takes."""


class Store:
    """Connections to the database. `write` is exclusive within the process; `read` is not."""

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except (ValueError, SQLAlchemyError):  # whose words hold parts of it
            raise StoreError(
                "FORESHOCK_DATABASE_URL is no address; give sqlite:///path/to/file.db or "
                "postgresql://user:password@host:5432/database, with %40 for an @ within the password"
            ) from None
        drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
        backend = parsed.drivername.split("+")[0]
        if backend not in drivers:
            raise StoreError(
                f"database_url begins with {parsed.drivername!r}; give sqlite:///path/to/file.db or "
                "postgresql://user:password@host/database"
            )
        self.sqlite = backend == "sqlite"
        if self.sqlite and not parsed.database:
            raise StoreError("database_url names no file; give sqlite:///path/to/file.db")
        if self.sqlite and parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        address, options = parsed.set(drivername=drivers[backend]), {} if self.sqlite else {"pool_pre_ping": True}
        self.engine: AsyncEngine = create_async_engine(address, pool_size=8, **options)
        # The writer's connection is its own: readers, however many, never take it.
        self._write_engine: AsyncEngine = create_async_engine(address, pool_size=1, max_overflow=0, **options)
        self._writing = asyncio.Lock()
        self._turns, self._heavy_waiting = asyncio.Semaphore(_HEAVY_READS), 0
        self.path = Path(parsed.database) if self.sqlite and parsed.database else None
        self._writer: ThreadExecutor | LoopExecutor
        self._looking: ThreadExecutor | LoopExecutor
        self._heavy: ThreadExecutor | LoopExecutor
        if self.sqlite:
            for engine in (self.engine.sync_engine, self._write_engine.sync_engine):
                _prepare(engine)
            plain = parsed.set(drivername="sqlite")
            self._writer = ThreadExecutor(
                "write", _prepare(create_engine(plain, pool_size=1, max_overflow=0)), 1, write=True
            )
            self._looking = ThreadExecutor("look", _prepare(create_engine(plain)), _LOOKS)
            self._heavy = ThreadExecutor("read", _prepare(create_engine(plain)), _HEAVY_READS)
        else:
            own = create_async_engine(address, pool_size=1, max_overflow=0, **options)
            self._writer = LoopExecutor("write", own, 1, write=True)
            self._looking = LoopExecutor("look", create_async_engine(address, pool_size=_LOOKS, **options), _LOOKS)
            self._heavy = LoopExecutor(
                "read", create_async_engine(address, pool_size=_HEAVY_READS, **options), _HEAVY_READS
            )

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection that sees one consistent state."""
        async with self.engine.connect() as connection:
            if not self.sqlite:
                await connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    async def read_in_thread(self, read: Work[T]) -> T:
        """Reads of one consistent state, beside the event loop. Raises ClosingError when the service goes down."""
        return await self._looking.run(read)

    @asynccontextmanager
    async def heavy_read_slot(self) -> AsyncIterator[Callable[[Work[T]], Coroutine[Any, Any, T]]]:
        """Wait for a turn to read much, a few at once: gives what reads as `read_in_thread` does.

        Raises BusyError when many wait.
        """
        if self._heavy_waiting >= _HEAVY_WAITING:
            raise BusyError
        self._heavy_waiting += 1
        try:
            async with self._turns:
                yield self._heavy.run
        finally:
            self._heavy_waiting -= 1

    async def transact(self, change: Work[T]) -> T:
        """As `write`, for a change that awaits nothing but its connection: it runs beside the event loop."""
        async with self._writing:
            return await self._writer.run(change)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: committed when the block ends, rolled back when it raises."""
        async with self._writing, self._write_engine.connect() as connection:
            if self.sqlite:
                await connection.execution_options(foreshock_write=True)
            async with connection.begin():
                yield connection

    async def migrate(self) -> None:
        """Bring the schema to this version. Raises StoreError where this package knows no way from the database's."""
        await self._check_known()
        async with self.engine.connect() as connection, connection.begin():
            await connection.run_sync(_upgrade)

    async def check_schema(self) -> None:
        """Raises StoreError unless the schema is exactly this version's."""
        await self._check_known()
        current, head = await self._revisions()
        if current != head:
            raise StoreError(
                f"the database is at schema {current or 'none'}, this service needs {head}; start one service with "
                "FORESHOCK_MIGRATE=true, or take a backup and do so"
            )

    async def _revisions(self) -> tuple[str | None, str | None]:
        async with self.engine.connect() as connection:
            current = await connection.run_sync(lambda c: MigrationContext.configure(c).get_current_revision())
        return current, _migrations().get_current_head()

    async def _check_known(self) -> None:
        current, _ = await self._revisions()
        known = [script.revision for script in _migrations().walk_revisions()]
        if current is None or current in known:
            return
        if current < known[-1]:
            raise StoreError(
                f"the database has schema {current}, of a foreshock from before the first release, and this one reads "
                f"{known[-1]} and later; keep it with the build that wrote it, and name a new database in "
                "FORESHOCK_DATABASE_URL"
            )
        raise StoreError(
            f"the database was written by a newer foreshock (schema {current}); install that version, "
            "or restore the backup that was taken before the upgrade"
        )

    async def give_back(self, kept: int = _FREE_PAGES) -> None:
        """Return some free pages of SQLite's file to the disk, but for those `kept`; PostgreSQL does so itself."""
        if self.path is not None:
            async with self._writing:
                await asyncio.to_thread(_give_back, self.path, kept)

    async def size_bytes(self, connection: AsyncConnection) -> float:
        """Bytes that the store takes."""
        if self.path is not None:
            parts = (self.path, self.path.with_name(self.path.name + "-wal"))
            return float(sum(part.stat().st_size for part in parts if part.exists()))
        size = await connection.execute(text("SELECT pg_database_size(current_database())"))
        return float(size.scalar_one())

    def cancel_reads(self) -> None:
        """The service goes down: reads under way are given up."""
        self._looking.cancel()
        self._heavy.cancel()

    async def close(self) -> None:
        """Close every connection."""
        self.cancel_reads()
        for executor in (self._writer, self._looking, self._heavy):
            await executor.close()
        await self._write_engine.dispose()
        await self.engine.dispose()


async def lock_runs(connection: AsyncConnection, run_ids: Collection[int]) -> None:
    """Hold these runs until the transaction ends. Whoever changes what belongs to a run calls this first, and once.

    Replicas then wait for one another and cannot deadlock: runs in the order of their ids, then the log. The lock
    lets rows be inserted that refer to the run (FOR NO KEY UPDATE). SQLite's one writer holds everything anyway.
    """
    if connection.dialect.name != "sqlite":
        held = select(runs.c.id).where(runs.c.id.in_(run_ids)).order_by(runs.c.id)
        await connection.execute(held.with_for_update(key_share=True))


async def lock_log(connection: AsyncConnection) -> None:
    """Called before rows are appended to `events` or `audit`: replicas append in one order, ids never overtake."""
    if connection.dialect.name != "sqlite":
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _EVENTS_LOCK})


def insert_or_ignore(connection: AsyncConnection, table: Table) -> Any:
    """An INSERT that leaves rows alone which are there already."""
    return _insert_or_ignore(connection.dialect.name, table)


@cache
def _insert_or_ignore(dialect: str, table: Table) -> Any:
    return (sqlite if dialect == "sqlite" else postgresql).insert(table).on_conflict_do_nothing()


def _alembic_config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("foreshock.server.store") / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


@cache
def _migrations() -> ScriptDirectory:
    """The migrations of this package: a start asks for them several times, and they are files to be read."""
    return ScriptDirectory.from_config(_alembic_config(None))


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # replicas that start at once migrate one after another
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    if MigrationContext.configure(connection).get_current_revision() is None:
        metadata.create_all(connection, checkfirst=False)
        command.stamp(_alembic_config(connection), "head")
    else:
        command.upgrade(_alembic_config(connection), "head")


def _prepare(engine: Engine) -> Engine:
    event.listen(engine, "do_connect", _sqlite_file)
    event.listen(engine, "connect", _sqlite_connect)
    event.listen(engine, "begin", _sqlite_begin)
    return engine


def _sqlite_file(_dialect: Any, _record: Any, arguments: Any, _options: Any) -> None:
    with suppress(OSError):  # what keeps SQLite from the file too, which then says so
        make_private(Path(arguments[0]))


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where `_sqlite_begin` says, not where the driver guesses
    cursor = connection.cursor()
    own = f"cache_size=-{_CACHE_KIB}", f"wal_autocheckpoint={_WAL_PAGES}"
    cursor.execute("PRAGMA page_count")
    [pages] = cursor.fetchone()
    of_a_new_file = () if pages else ("auto_vacuum=INCREMENTAL",)  # elsewhere it would write, also to a full disk
    for pragma in (
        *of_a_new_file,
        "journal_mode=WAL",
        "synchronous=FULL",
        "busy_timeout=5000",
        "foreign_keys=ON",
        *own,
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _give_back(path: Path, kept: int) -> None:
    with closing(sqlite3.connect(path, timeout=5.0)) as connection:
        [free] = connection.execute("PRAGMA freelist_count").fetchone()
        if free > kept:  # a script, since `execute` takes one step, which gives back one page
            connection.executescript(f"PRAGMA incremental_vacuum({min(free - kept, _PAGES_AT_ONCE)})")


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("foreshock_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def make_private(file: Path) -> None:
    """Make an empty file that its owner alone may read; what lies there already is closed to others, if it is ours.

    What SQLite makes beside a database gets the rights of the database.
    """
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    for ending in BESIDE:
        with suppress(FileNotFoundError, PermissionError):
            Path(f"{file}{ending}").chmod(0o600)
