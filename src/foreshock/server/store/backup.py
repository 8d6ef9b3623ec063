"""A copy of the store that is consistent in itself, made while ingest goes on, and the way back from it."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, func, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from foreshock.server.store.database import BESIDE, Store, StoreError, address_of, file_of, make_private, unusable
from foreshock.server.store.schema import audit, batches, runs


def backup(url: str, file: Path) -> None:
    """Copy the store at `url` into a new file: SQLite by its backup interface, PostgreSQL by pg_dump (custom format).

    The file appears under its name once it is whole and on the disk. Raises StoreError with a sentence.
    """
    if file.exists():
        raise StoreError(f"{file} exists; a backup overwrites nothing, give another name")
    address = address_of(url)
    with _made_whole(file) as partial:
        if source := file_of(address):
            _copy_sqlite(source, partial)
        else:
            _call(address, "pg_dump", "--format=custom", f"--file={partial}")
        with partial.open("rb+") as written:
            os.fsync(written.fileno())


def restore(file: Path, url: str) -> None:
    """Put a backup where nothing is: a SQLite file that does not exist yet, a PostgreSQL database without tables.

    Stop the service first. Raises StoreError with a sentence.
    """
    address = address_of(url)
    if not file.is_file():
        raise StoreError(f"there is no file {file}")
    if target := file_of(address):
        # a write-ahead log that belongs to another file would be played into this one
        if there := [name for end in BESIDE if (name := target.with_name(target.name + end)).exists()]:
            raise StoreError(f"{', '.join(map(str, there))} exists; stop the service and move it away first")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _made_whole(target) as partial:
            _copy_sqlite(file, partial)
    else:
        _call(address, "pg_restore", "--exit-on-error", "--single-transaction", str(file))


@contextmanager
def _made_whole(file: Path) -> Iterator[Path]:
    """Where to write it: the file has its name when that succeeded, and nothing of it is left when it did not."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")  # another backup into this file has its own
    make_private(partial)
    try:
        yield partial
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


async def examine(url: str) -> dict[str, int]:
    """How many runs, batches and rows of the audit trail a store holds. Raises StoreError where there is none."""
    if (file := file_of(address_of(url))) and not file.is_file():  # SQLite would make one
        raise StoreError(f"there is no file {file}")
    tables = {"runs": runs, "batches": batches, "audit_rows": audit}  # all are there in every schema that is known

    def count(connection: Connection) -> dict[str, int]:
        counts = {name: select(func.count()).select_from(table) for name, table in tables.items()}
        return {name: connection.execute(query).scalar_one() for name, query in counts.items()}

    store = Store(url)
    try:
        if await store.revision() is None:
            raise StoreError("the database holds no store of foreshock")
        return await store.read(count)
    except SQLAlchemyError as error:
        raise unusable(error, url) from None
    finally:
        await store.close()


def _copy_sqlite(source: Path, target: Path) -> None:
    if not source.is_file():
        raise StoreError(f"there is no file {source}")
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)  # all pages in one read transaction: a writer beside it neither waits nor spoils it
            new.execute("PRAGMA journal_mode=DELETE")  # one file, without a write-ahead log beside it
            [verdict] = new.execute("PRAGMA integrity_check").fetchone()
            ours = new.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{source} cannot be copied: {error}") from None
    if ours is None:
        raise StoreError(f"{source} holds no store of foreshock; give the file that `foreshock serve` writes")
    if verdict != "ok":
        raise StoreError(f"{source} is damaged: {verdict}")


def _call(url: URL, tool: str, *options: str) -> None:
    """Call a client program of PostgreSQL. Raises StoreError with what it says."""
    found = shutil.which(tool)
    if found is None:
        raise StoreError(f"{tool} is not on the PATH; it comes with PostgreSQL's client programs")
    # Without its password, which would stand in the list of processes. (URL.set cannot take a password away.)
    shown = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    password = {"PGPASSWORD": str(url.password)} if url.password is not None else {}
    command = [found, "--no-owner", "--no-privileges", f"--dbname={shown.render_as_string()}", *options]
    done = subprocess.run(command, env={**os.environ, **password}, capture_output=True, text=True)
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr.strip()[:300])
        if "already exists" in why:
            raise StoreError("the database already holds tables, and a restore overwrites none; give an empty database")
        raise StoreError(f"{tool} failed: {why}")
