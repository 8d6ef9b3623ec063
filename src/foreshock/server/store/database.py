"""The database: one engine, one writer at a time, migrations shipped in the package; its threads and their turns.

SQLite runs in WAL mode with synchronous=FULL: what is committed survives a kill and a power cut. PostgreSQL is chosen
by URL and may be shared by several replicas of the service. Reading and writing happen in threads of their own: neither
holds up the other, nor the event loop.
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
    """Whether the same work may succeed later, as it is."""
    return isinstance(error, _PASSING) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def log_store_error(sentence: str, error: BaseException, **fields: Any) -> None:
    """Log that work failed; where the store is away in one line, else with everything that helps to find the fault."""
    away = is_away(error)
    log.error(sentence, error=str(error).partition("\n")[0][:500], exc_info=None if away else error, **fields)


Values = Mapping[str, Any]


class Many:
    """A statement with these parameters, two or more; values are of types that the database's driver takes as they are:
    numbers, truth values, text, bytes."""

    def __init__(self, statement: UpdateBase, parameters: Iterable[str]) -> None:
        self._statement, self._parameters = statement, list(parameters)
        self._compiled: dict[str, tuple[str, Callable[[Values], Any]]] = {}

    def execute(self, connection: Connection, rows: Iterable[Values]) -> None:
        """Execute it for each of these rows, one at least; every parameter is among a row's values."""
        dialect = connection.dialect
        if dialect.name not in self._compiled:
            self._compiled[dialect.name] = self._compile(dialect)
        words, given = self._compiled[dialect.name]
        connection.exec_driver_sql(words, [given(row) for row in rows])

    def _compile(self, dialect: Dialect) -> tuple[str, Callable[[Values], Any]]:
        compiled: Any = self._statement.compile(dialect=dialect, column_keys=self._parameters)
        return str(compiled), itemgetter(*compiled.positiontup) if dialect.positional else dict


class BusyError(Exception):
    """This caller already has as many requests waiting as it may."""


class LeftError(Exception):
    """The caller left before its turn came."""


class Turns:
    """`at_once` turns are taken together; of each caller up to `waiting` requests wait. Callers take turns."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free, self._most = at_once, waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests by caller; of those that have any, the caller whose turn comes next is the first."""

    @asynccontextmanager
    async def turn(self, caller: str, leaves: asyncio.Future[None] | None = None) -> AsyncIterator[None]:
        """Wait for a turn of this caller, which gives up its place when `leaves` is done.

        Raises BusyError when too many requests of the caller wait, LeftError when it left.
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
            if turn.done():  # it came just as the caller left
                self._pass_on()
            else:
                own.remove(turn)
            raise

    def _pass_on(self) -> None:
        for caller in [*self._waiting]:
            if own := self._waiting.pop(caller):
                own.popleft().set_result(None)
                self._waiting[caller] = own  # behind the others
                return
        self._free += 1


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


async def pause(closing: asyncio.Event, seconds: float) -> None:
    """Wait `seconds`, or until `closing` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await closing.wait()


async def repeat(work: Callable[[], Awaitable[None]], sentence: str, seconds: float, closing: asyncio.Event) -> None:
    """Work after every pause until `closing` is set; log this sentence when it fails, and go on."""
    while not closing.is_set():
        await pause(closing, seconds)
        try:
            await work()
        except ClosingError:
            return
        except Exception as error:
            log_store_error(f"{sentence}; it is tried again", error)


_EVENTS_LOCK: Final = 0x666F7265  # any fixed number; the same in every replica
_MIGRATION_LOCK: Final = _EVENTS_LOCK + 1
_READS: Final = 8
"""Reads at once; those that take turns, those of scrapes and those for roll-ups take seven of them at most."""
_TURNS: Final = 2
"""Large reads at once that people ask for; each may hold a few hundred MiB, and takes a processor from who writes."""
_WAITING: Final = 64
"""Reads of one caller that wait for a turn; beyond, the caller is asked to come back."""
_WAITING_FOR_LITTLE: Final = 256
"""The same of small reads: a page makes several for each run that it shows, and a team may share one token."""
_PRAGMAS: Final = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "busy_timeout=5000",
    "foreign_keys=ON",
    "cache_size=-8192",  # KiB of pages that a connection keeps of its own; the system's cache serves all of them
    "wal_autocheckpoint=4000",  # pages after which the log is copied into the file: the commit that does it waits
)
_FREE_PAGES: Final = 4096
"""Pages that stay in the file after a deletion; what lies beyond goes back to the disk."""
_DRIVERS: Final = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_PATIENCE: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
"""Of libpq, where the address says nothing else: who waits for a machine that is gone learns so in a minute."""
_PAGES_AT_ONCE: Final = 2048
"""Of those at once, while ingest waits: some hundredths of a second."""
BESIDE: Final = ("", "-wal", "-shm")
"""What SQLite keeps of one database: the file, its write-ahead log, and the index of that."""
_RESTORE: Final = (
    "move it away with its -wal and -shm, keep them, and bring the newest backup back with `foreshock store restore`; "
    "if it never held a store, name another file in FORESHOCK_DATABASE_URL"
)
_REACH: Final = "the service's user must be able to write the file and its folder"
_REMEDIES: Final = {
    "SQLITE_CORRUPT": f"it is damaged: {_RESTORE}",
    "SQLITE_NOTADB": f"it is damaged or no database: {_RESTORE}",
    "SQLITE_BUSY": "another program holds it: stop it first, because only one process may use a SQLite file",
    "SQLITE_CANTOPEN": _REACH,
    "SQLITE_READONLY": _REACH,
    "SQLITE_FULL": "make room on its disk",
    "SQLITE_IOERR": "make room on its disk, and look for errors of that disk in the system's log",
}
"""What to do, by the beginning of SQLite's name for the error."""


class StoreError(ValueError):
    """The store cannot be used as it is; the message says what to do."""


def unusable(error: Exception, url: str) -> StoreError:
    """The sentence for a database at `url` that failed so when it was opened: what was found, where, what to do."""
    said = f"the database cannot be used: {str(error).splitlines()[0]}"
    name = getattr(error.orig, "sqlite_errorname", "") if isinstance(error, DBAPIError) else ""
    remedy = next((words for known, words in _REMEDIES.items() if name.startswith(known)), None)
    return StoreError(said if remedy is None else f"{said} ({file_of(address_of(url))}); {remedy}")


def address_of(url: str) -> URL:
    """A store's address with the driver that reaches it. Raises StoreError, which holds nothing of what was given."""
    try:
        parsed = make_url(url)
    except (ValueError, SQLAlchemyError):  # whose words hold parts of it
        raise StoreError(
            "FORESHOCK_DATABASE_URL is no address; give sqlite:///path/to/file.db or "
            "postgresql://user:password@host:5432/database, with %40 for an @ within the password"
        ) from None
    backend = parsed.drivername.split("+")[0]
    if backend not in _DRIVERS:
        raise StoreError(
            f"database_url begins with {parsed.drivername!r}; give sqlite:///path/to/file.db or "
            "postgresql://user:password@host/database"
        )
    if backend == "sqlite" and (parsed.database or ":memory:") == ":memory:":
        raise StoreError("database_url names no file; give sqlite:///path/to/file.db")
    if backend == "sqlite" and parsed.query:
        raise StoreError("database_url has options after a ?, and SQLite takes none; give sqlite:///path/to/file.db")
    return parsed.set(drivername=_DRIVERS[backend])


def file_of(address: URL) -> Path | None:
    """SQLite's file; None for PostgreSQL."""
    return Path(str(address.database)) if address.get_backend_name() == "sqlite" else None


@contextmanager
def sole_service(url: str) -> Iterator[None]:
    """Serve a SQLite file as its only service, however this process ends. Raises StoreError where another does.

    PostgreSQL may be shared. A file system without locks lets everybody in.
    """
    path = file_of(address_of(url))
    if path is None:
        yield
        return
    import fcntl  # Windows has none

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o600)
    except OSError:  # what keeps the lock away keeps SQLite away too, which then says so
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
    """Connections to the database. `write` is exclusive within the process; `read` is not."""

    def __init__(self, url: str) -> None:
        address = address_of(url)
        self.path = file_of(address)
        self.sqlite = self.path is not None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        # The writer's connection is its own: readers, however many, never take it.
        self.writer = Executor("write", _engine(address, 1, write=True), 1)
        self.reader = Executor("read", _engine(address, _READS), _READS)
        self.large, self.small = Turns(_TURNS, _WAITING), Turns(_TURNS, _WAITING_FOR_LITTLE)
        """Turns at reading curves, matrices and missed events; and, since those take long, at all else."""

    async def read(self, read: Work[T]) -> T:
        """Read one consistent state, beside the event loop. Raises ClosingError when the service goes down."""
        return await self.reader.run(read)

    async def write(self, change: Work[T]) -> T:
        """A transaction, beside the event loop: committed when the change returns, rolled back when it raises."""
        return await self.writer.run(change)

    async def migrate(self) -> None:
        """Bring the schema to this version. Raises StoreError where this package knows no way from the database's."""
        await self.revision()
        await self.write(_upgrade)

    async def check_schema(self) -> None:
        """Raises StoreError unless the schema is exactly this version's."""
        current, head = await self.revision(), _migrations().get_current_head()
        if current != head:
            raise StoreError(
                f"the database is at schema {current or 'none'}, this service needs {head}; start one service with "
                "FORESHOCK_MIGRATE=true, or take a backup and do so"
            )

    async def revision(self) -> str | None:
        """The schema's, None in a database without one. Raises StoreError for one that this package does not know."""
        current = await self.read(lambda connection: MigrationContext.configure(connection).get_current_revision())
        known = [script.revision for script in _migrations().walk_revisions()]
        if current is None or current in known:
            return current
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

        def vacuum(connection: Connection) -> None:
            free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            if free > kept:  # a script, since `execute` takes one step, which gives back one page
                driver: Any = connection.connection.driver_connection
                driver.executescript(f"PRAGMA incremental_vacuum({min(free - kept, _PAGES_AT_ONCE)})")

        if self.sqlite:
            await self.write(vacuum)

    def size_bytes(self, connection: Connection) -> float:
        """Bytes that the store takes."""
        if self.path is not None:
            parts = (self.path, self.path.with_name(self.path.name + "-wal"))
            return float(sum(part.stat().st_size for part in parts if part.exists()))
        return float(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())

    def cancel_reads(self) -> None:
        """The service goes down: reads under way are given up."""
        self.reader.cancel()

    async def close(self) -> None:
        """Close every connection."""
        self.cancel_reads()
        await self.writer.close()
        await self.reader.close()


def lock_runs(connection: Connection, run_ids: Collection[int]) -> None:
    """Hold these runs until the transaction ends. Whoever changes what belongs to a run calls this first, and once.

    Replicas then wait for one another and cannot deadlock: runs in the order of their ids, then the log. The lock
    lets rows be inserted that refer to the run (FOR NO KEY UPDATE). SQLite's one writer holds everything anyway.
    """
    if connection.dialect.name != "sqlite":
        held = select(runs.c.id).where(runs.c.id.in_(run_ids)).order_by(runs.c.id)
        connection.execute(held.with_for_update(key_share=True))


def lock_log(connection: Connection) -> None:
    """Called before rows are appended to `events` or `audit`: replicas append in one order, ids never overtake."""
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _EVENTS_LOCK})


def insert_or_ignore(connection: Connection, table: Table) -> Any:
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
    with suppress(OSError):  # what keeps SQLite from the file too, which then says so
        make_private(Path(arguments[0]))


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where `_engine` says, not where the driver guesses
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    [_, _, file] = connection.execute("PRAGMA database_list").fetchone()
    for ending in BESIDE:  # now that it is a database: a slip in the address may name a folder, or a system's file
        with suppress(FileNotFoundError, PermissionError):
            Path(f"{file}{ending}").chmod(0o600)
    if not pages:  # elsewhere it would write, also to a full disk
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def make_private(file: Path) -> None:
    """Make an empty file that its owner alone may read, unless something lies there.

    What SQLite makes beside a database gets the rights of the database.
    """
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def set_state(connection: Connection, key: str, value: float) -> None:
    """Keep a number of the service itself, as `service_state` has it."""
    connection.execute(insert_or_ignore(connection, service_state).values(key=key, value=value))
    connection.execute(update(service_state).where(service_state.c.key == key).values(value=value))
