"""The database: engines, transactions with a single writer, migrations, and queues that limit concurrent requests.

SQLite runs in WAL mode with synchronous=FULL, so committed data survives a kill and a power cut. PostgreSQL is selected
by the URL, and several replicas of the service may share it. Reads and writes run in separate threads, so they block
neither each other nor the event loop.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Dialect, Engine, Table, create_engine, event, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.sql.dml import UpdateBase

from foreshock.server.store.schema import metadata, runs, service_state

log = structlog.get_logger()
_PASSING: Final = (OperationalError, InterfaceError, InternalError, PoolTimeoutError)


def is_away(error: BaseException) -> bool:
    """Whether the error is temporary, so that the same work may succeed on a retry."""
    return isinstance(error, _PASSING) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def log_store_error(sentence: str, error: BaseException, **fields: Any) -> None:
    """Log that work failed: in one line if the store is only unavailable, else with the traceback."""
    away = is_away(error)
    log.error(sentence, error=str(error).partition("\n")[0][:500], exc_info=None if away else error, **fields)


Values = Mapping[str, Any]


class Many:
    """A statement with two or more parameters, compiled once per dialect and executed for many rows.

    Values must have types that the database driver accepts directly: numbers, booleans, text, bytes.
    """

    def __init__(self, statement: UpdateBase, parameters: Iterable[str]) -> None:
        self._statement, self._parameters = statement, list(parameters)
        self._compiled: dict[str, tuple[str, Callable[[Values], Any]]] = {}

    def execute(self, connection: Connection, rows: Iterable[Values]) -> None:
        """Execute the statement for each of `rows` (at least one); every row has a value for every parameter."""
        dialect = connection.dialect
        if dialect.name not in self._compiled:
            self._compiled[dialect.name] = self._compile(dialect)
        words, given = self._compiled[dialect.name]
        connection.exec_driver_sql(words, [given(row) for row in rows])

    def _compile(self, dialect: Dialect) -> tuple[str, Callable[[Values], Any]]:
        compiled: Any = self._statement.compile(dialect=dialect, column_keys=self._parameters)
        return str(compiled), itemgetter(*compiled.positiontup) if dialect.positional else dict


class BusyError(Exception):
    """The caller already has the maximum number of waiting requests."""


class LeftError(Exception):
    """The caller disconnected before its turn came."""


class Turns:
    """A fair semaphore: `at_once` requests run at the same time, and up to `waiting` requests of each caller wait.

    A freed place goes to the waiting callers in rotation.
    """

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free, self._most = at_once, waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests by caller; the caller whose turn is next comes first."""

    @asynccontextmanager
    async def turn(self, caller: str, leaves: asyncio.Future[None] | None = None) -> AsyncIterator[None]:
        """Wait for a turn of `caller`; stop waiting when `leaves` is done.

        Raises BusyError if too many requests of the caller wait already, LeftError if the caller left.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller, leaves)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str, leaves: asyncio.Future[None] | None) -> None:
        own = self._waiting.setdefault(caller, deque())
        if len(own) >= self._most:
            raise BusyError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own.append(turn)
        try:
            await asyncio.wait({turn, leaves} if leaves else {turn}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                raise LeftError
        except (asyncio.CancelledError, LeftError):
            if turn.done():  # the turn came just as the caller left
                self._pass_on()
            else:
                own.remove(turn)
            raise

    def _pass_on(self) -> None:
        for caller in [*self._waiting]:
            if own := self._waiting.pop(caller):
                own.popleft().set_result(None)
                self._waiting[caller] = own  # insert the caller again, at the end of the rotation
                return
        self._free += 1


T = TypeVar("T")
Work = Callable[[Connection], T]
"""Work on a connection, in one transaction."""
_CANCELLED: Final = "foreshock_cancelled"


class ClosingError(Exception):
    """The service is shutting down, so this read was cancelled."""


class Executor:
    """Runs work in up to `threads` threads, each time with a connection of `engine`."""

    def __init__(self, name: str, engine: Engine, threads: int) -> None:
        self.engine = engine
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"foreshock-{name}")
        self._cancelled = threading.Event()

    async def run(self, work: Work[T]) -> T:
        """Run `work` in one transaction and return its result once the transaction is committed.

        Raises ClosingError if the executor is cancelled.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)

    def _run(self, work: Work[T]) -> T:
        with self.engine.connect() as connection:
            connection.execution_options(**{_CANCELLED: self._cancelled})
            give_up_if_cancelled(connection)
            with connection.begin():
                return work(connection)

    def cancel(self) -> None:
        """Start no further work; work in progress ends at its next call of `give_up_if_cancelled`."""
        self._cancelled.set()

    async def close(self) -> None:
        """Wait for work in progress, then close the connections."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self.engine.dispose()


def give_up_if_cancelled(connection: Connection) -> None:
    """Raise ClosingError if the executor was cancelled. Long reads call this function repeatedly."""
    if connection.get_execution_options()[_CANCELLED].is_set():
        raise ClosingError


async def pause(closing: asyncio.Event, seconds: float) -> None:
    """Wait `seconds`, or until `closing` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await closing.wait()


async def repeat(work: Callable[[], Awaitable[None]], sentence: str, seconds: float, closing: asyncio.Event) -> None:
    """Call `work` every `seconds` until `closing` is set. If a call fails, log `sentence` and continue."""
    while not closing.is_set():
        await pause(closing, seconds)
        try:
            await work()
        except ClosingError:
            return
        except Exception as error:
            log_store_error(f"{sentence}; the service tries again", error)


_EVENTS_LOCK: Final = 0x666F7265  # any fixed number; the same in every replica
_MIGRATION_LOCK: Final = _EVENTS_LOCK + 1
_READS: Final = 8
"""Concurrent reads. Reads that take turns, scrapes and roll-ups use at most seven of these connections together."""
_TURNS: Final = 2
"""Concurrent large reads for people; each may need a few hundred MiB, and takes processor time from the writer."""
_WAITING: Final = 64
"""Reads of one caller that wait for a turn; the service rejects further ones and asks the caller to retry."""
_WAITING_FOR_LITTLE: Final = 256
"""The same limit for small reads: a page makes several for each run that it shows, and a team may share one token."""
_PRAGMAS: Final = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "busy_timeout=5000",
    "foreign_keys=ON",
    "cache_size=-8192",  # KiB of page cache per connection; the operating system's cache is shared by all of them
    "wal_autocheckpoint=4000",  # pages in the log before a commit copies them into the file; that commit takes longer
)
_FREE_PAGES: Final = 4096
"""Free pages that stay in the file after a deletion; further ones are returned to the disk."""
_DRIVERS: Final = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_PATIENCE: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
"""Defaults for libpq unless the address sets them: a connection to an unreachable machine fails within a minute."""
_PAGES_AT_ONCE: Final = 2048
"""Free pages returned in one transaction; ingest waits for it, some hundredths of a second."""
SUFFIXES: Final = ("", "-wal", "-shm")
"""Suffixes of the files of one SQLite database: the file, its write-ahead log, and the index of the log."""
_RESTORE: Final = (
    "move it away with its -wal and -shm, keep them, and restore the newest backup with `foreshock store restore`; "
    "if the file never contained a store, set FORESHOCK_DATABASE_URL to another file"
)
_REACH: Final = "the service's user must be able to write the file and its folder"
_REMEDIES: Final = {
    "SQLITE_CORRUPT": f"it is damaged: {_RESTORE}",
    "SQLITE_NOTADB": f"it is damaged or not a database: {_RESTORE}",
    "SQLITE_BUSY": "another program has locked it: stop it first, because only one process may use a SQLite file",
    "SQLITE_CANTOPEN": _REACH,
    "SQLITE_READONLY": _REACH,
    "SQLITE_FULL": "make room on its disk",
    "SQLITE_IOERR": "make room on its disk, and look for errors of that disk in the system's log",
}
"""The remedy for an error, by the prefix of SQLite's error name."""


class StoreError(ValueError):
    """The store cannot be used in its present state; the message says what to do."""


def unusable(error: Exception, url: str) -> StoreError:
    """Return the error for a database at `url` that could not be opened: the cause, the file, and the remedy."""
    said = f"the database cannot be used: {str(error).splitlines()[0]}"
    name = getattr(error.orig, "sqlite_errorname", "") if isinstance(error, DBAPIError) else ""
    remedy = next((words for known, words in _REMEDIES.items() if name.startswith(known)), None)
    return StoreError(said if remedy is None else f"{said} ({file_of(address_of(url))}); {remedy}")


def address_of(url: str) -> URL:
    """Return a store's address with the driver to use. Raises StoreError, whose message contains no part of `url`."""
    try:
        parsed = make_url(url)
    except (ValueError, SQLAlchemyError):  # their messages may contain the password
        raise StoreError(
            "FORESHOCK_DATABASE_URL is not an address; set it to sqlite:///path/to/file.db or "
            "postgresql://user:password@host:5432/database, with %40 for an @ within the password"
        ) from None
    backend = parsed.drivername.split("+")[0]
    if backend not in _DRIVERS:
        raise StoreError(
            f"database_url begins with {parsed.drivername!r}; set it to sqlite:///path/to/file.db or "
            "postgresql://user:password@host/database"
        )
    if backend == "sqlite" and (parsed.database or ":memory:") == ":memory:":
        raise StoreError("database_url does not name a file; set it to sqlite:///path/to/file.db")
    if backend == "sqlite" and parsed.query:
        raise StoreError("database_url has options after a ?, which SQLite lacks; set it to sqlite:///path/to/file.db")
    return parsed.set(drivername=_DRIVERS[backend])


def file_of(address: URL) -> Path | None:
    """Return the path of SQLite's file; None for PostgreSQL."""
    return Path(str(address.database)) if address.get_backend_name() == "sqlite" else None


@contextmanager
def sole_service(url: str) -> Iterator[None]:
    """Lock a SQLite file until the block or the process ends. Raises StoreError if another service has locked it.

    PostgreSQL may be shared and is not locked. On a file system without locks a second service is not noticed.
    """
    path = file_of(address_of(url))
    if path is None:
        yield
        return
    import fcntl  # Windows has none

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o600)
    except OSError:  # SQLite will fail for the same reason, with a better message
        yield
        return
    with os.fdopen(lock, "w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another service already uses {path}: stop it first, because only one process may use a SQLite file; "
                "several services need PostgreSQL"
            ) from None
        except OSError as error:
            log.warning("the file system has no locks, so a second service would not be noticed", error=str(error))
        yield


class Store:
    """Connections to the database. Within the process one `write` runs at a time; reads run concurrently."""

    def __init__(self, url: str) -> None:
        address = address_of(url)
        self.path = file_of(address)
        self.sqlite = self.path is not None
        if self.path is not None:
            with suppress(OSError):  # SQLite will fail for the same reason, with a better message
                self.path.parent.mkdir(parents=True, exist_ok=True)
        # The writer has its own engine, so that readers never use its connection.
        self.writer = Executor("write", _engine(address, 1, write=True), 1)
        self.reader = Executor("read", _engine(address, _READS), _READS)
        self.large, self.small = Turns(_TURNS, _WAITING), Turns(_TURNS, _WAITING_FOR_LITTLE)
        """Turns for reads of curves, matrices and missed events, which take long, and turns for all other reads."""

    async def read(self, read: Work[T]) -> T:
        """Read one consistent state in another thread. Raises ClosingError if the service shuts down."""
        return await self.reader.run(read)

    async def write(self, change: Work[T]) -> T:
        """Run a transaction in another thread: committed when `change` returns, rolled back when it raises."""
        return await self.writer.run(change)

    async def migrate(self) -> None:
        """Upgrade the schema to this version. Raises StoreError if this package has no migration from the old one."""
        await self.revision()
        await self.write(_upgrade)

    async def check_schema(self) -> None:
        """Raise StoreError unless the schema is exactly this version's."""
        current, head = await self.revision(), _migrations().get_current_head()
        if current != head:
            raise StoreError(
                f"the database is at schema {current or 'none'}, this service needs {head}; start one service with "
                "FORESHOCK_MIGRATE=true, or take a backup and do so"
            )

    async def revision(self) -> str | None:
        """Return the schema's revision, or None for an empty database. Raises StoreError if the revision is unknown."""
        current = await self.read(lambda connection: MigrationContext.configure(connection).get_current_revision())
        known = [script.revision for script in _migrations().walk_revisions()]
        if current is None or current in known:
            return current
        if current < known[-1]:
            raise StoreError(
                f"the database has schema {current}, of a foreshock from before the first release, but this version "
                f"reads {known[-1]} and later; keep it with the build that wrote it, and set FORESHOCK_DATABASE_URL to "
                "a new database"
            )
        raise StoreError(
            f"the database was written by a newer foreshock (schema {current}); install that version, "
            "or restore the backup that was taken before the upgrade"
        )

    async def give_back(self, kept: int = _FREE_PAGES) -> None:
        """Return some free pages of SQLite's file to the disk, except `kept` of them; PostgreSQL needs no such call."""

        def vacuum(connection: Connection) -> None:
            free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            if free > kept:  # as a script, because `execute` runs only one step, which returns one page
                driver: Any = connection.connection.driver_connection
                driver.executescript(f"PRAGMA incremental_vacuum({min(free - kept, _PAGES_AT_ONCE)})")

        if self.sqlite:
            await self.write(vacuum)

    def size_bytes(self, connection: Connection) -> float:
        """Return the size of the store in bytes."""
        if self.path is not None:
            parts = (self.path, self.path.with_name(self.path.name + "-wal"))
            return float(sum(part.stat().st_size for part in parts if part.exists()))
        return float(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())

    def cancel_reads(self) -> None:
        """Cancel reads in progress, because the service is shutting down."""
        self.reader.cancel()

    async def close(self) -> None:
        """Close every connection."""
        self.cancel_reads()
        await self.writer.close()
        await self.reader.close()


def lock_runs(connection: Connection, run_ids: Collection[int]) -> None:
    """Lock these runs until the transaction ends. Call this once, before any other change of data of these runs.

    Replicas lock in the same order, runs by id and then the log, and so cannot deadlock. Rows that refer to a locked
    run can still be inserted (FOR NO KEY UPDATE). SQLite needs no such lock, because it has a single writer.
    """
    if connection.dialect.name != "sqlite":
        held = select(runs.c.id).where(runs.c.id.in_(run_ids)).order_by(runs.c.id)
        connection.execute(held.with_for_update(key_share=True))


def lock_log(connection: Connection) -> None:
    """Lock `events` and `audit` before appending, so that rows of all replicas become visible in the order of ids."""
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _EVENTS_LOCK})


def insert_or_ignore(connection: Connection, table: Table) -> Any:
    """Return an INSERT that does nothing for rows that exist already."""
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
    """Return the migrations of this package; cached, because a start needs them several times."""
    return ScriptDirectory.from_config(_alembic_config(None))


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # replicas that start at the same time migrate one after another
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    if MigrationContext.configure(connection).get_current_revision() is None:
        metadata.create_all(connection, checkfirst=False)
        command.stamp(_alembic_config(connection), "head")
    else:
        command.upgrade(_alembic_config(connection), "head")


def _engine(address: URL, connections: int, *, write: bool = False) -> Engine:
    pool: dict[str, Any] = {"pool_size": connections, "max_overflow": 0}
    if address.get_backend_name() != "sqlite":
        if not write:
            pool["isolation_level"] = "REPEATABLE READ"
        patient = address.set(query={**_PATIENCE, **address.query})
        return create_engine(patient, pool_pre_ping=True, **pool)
    engine = create_engine(address, **pool)
    event.listen(engine, "do_connect", _sqlite_file)
    event.listen(engine, "connect", _sqlite_connect)
    begin = "BEGIN IMMEDIATE" if write else "BEGIN"
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _sqlite_file(_dialect: Any, _record: Any, arguments: Any, _options: Any) -> None:
    with suppress(OSError):  # SQLite will fail for the same reason, with a better message
        make_private(Path(arguments[0]))


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_engine` begins transactions, not the driver
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    [_, _, file] = connection.execute("PRAGMA database_list").fetchone()
    for suffix in SUFFIXES:  # only now that it is known to be a database: a wrong URL may name any other file
        with suppress(FileNotFoundError, PermissionError):
            Path(f"{file}{suffix}").chmod(0o600)
    if not pages:  # only for a new file: this pragma writes, which fails on a full disk
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def make_private(file: Path) -> None:
    """Create an empty file that only its owner may read, unless the path exists.

    SQLite creates the other files of a database with the permissions of the database file.
    """
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def set_state(connection: Connection, key: str, value: float) -> None:
    """Store a number of the service itself in `service_state`."""
    connection.execute(insert_or_ignore(connection, service_state).values(key=key, value=value))
    connection.execute(update(service_state).where(service_state.c.key == key).values(value=value))
