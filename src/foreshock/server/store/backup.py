"""Consistent backups of the store while the service is running, and their restoration."""

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

from foreshock.server.store.database import SUFFIXES, Store, StoreError, address_of, file_of, make_private, unusable
from foreshock.server.store.schema import audit, batches, runs


def backup(url: str, file: Path) -> None:
    """Copy the store at `url` into a new file: SQLite by its backup interface, PostgreSQL by pg_dump (custom format).

    The file gets its name only when it is complete and on the disk. Raises StoreError if the backup fails.
    """
    if file.exists():
        raise StoreError(f"{file} exists; a backup never overwrites a file, so give another name")
    address = address_of(url)
    with _made_whole(file) as partial:
        if source := file_of(address):
            _copy_sqlite(source, partial)
        else:
            _call(address, "pg_dump", "--format=custom", f"--file={partial}")
        with partial.open("rb+") as written:
            os.fsync(written.fileno())


def restore(file: Path, url: str) -> None:
    """Restore a backup into a SQLite file that does not exist yet, or into a PostgreSQL database without tables.

    Stop the service first. Raises StoreError if the backup cannot be restored.
    """
    address = address_of(url)
    if not file.is_file():
        raise StoreError(f"there is no file {file}")
    if target := file_of(address):
        # SQLite would apply a write-ahead log of the former file to the restored one
        if there := [name for end in SUFFIXES if (name := target.with_name(target.name + end)).exists()]:
            raise StoreError(f"{', '.join(map(str, there))} exists; stop the service and move it away first")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _made_whole(target) as partial:
            _copy_sqlite(file, partial)
    else:
        _call(address, "pg_restore", "--exit-on-error", "--single-transaction", str(file))


@contextmanager
def _made_whole(file: Path) -> Iterator[Path]:
    """Yield a path to write to; it is renamed to `file` if the body succeeds, and deleted if it fails."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")  # differs from that of a concurrent backup
    make_private(partial)
    try:
        yield partial
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


async def examine(url: str) -> dict[str, int]:
    """Count the runs, batches and audit rows of the store at `url`. Raises StoreError if there is no store."""
    if (file := file_of(address_of(url))) and not file.is_file():  # SQLite would create the file
        raise StoreError(f"there is no file {file}")
    tables = {"runs": runs, "batches": batches, "audit_rows": audit}  # tables that every known schema has

    def count(connection: Connection) -> dict[str, int]:
        counts = {name: select(func.count()).select_from(table) for name, table in tables.items()}
        return {name: connection.execute(query).scalar_one() for name, query in counts.items()}

    store = Store(url)
    try:
        if await store.revision() is None:
            raise StoreError("the database does not contain a foreshock store")
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
            old.backup(new)  # in one read transaction, so a concurrent writer neither waits nor changes the copy
            new.execute("PRAGMA journal_mode=DELETE")  # a single file, without a write-ahead log
            [verdict] = new.execute("PRAGMA integrity_check").fetchone()
            ours = new.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{source} cannot be copied: {error}") from None
    if ours is None:
        raise StoreError(f"{source} does not contain a foreshock store; give the file that `foreshock serve` writes")
    if verdict != "ok":
        raise StoreError(f"{source} is damaged: {verdict}")


def _call(url: URL, tool: str, *options: str) -> None:
    """Call a client program of PostgreSQL. Raises StoreError with its error message."""
    found = shutil.which(tool)
    if found is None:
        raise StoreError(f"{tool} is not on the PATH; it comes with PostgreSQL's client programs")
    # Without the password, which the list of processes would show. (URL.set cannot remove a password.)
    shown = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    password = {"PGPASSWORD": str(url.password)} if url.password is not None else {}
    command = [found, "--no-owner", "--no-privileges", f"--dbname={shown.render_as_string()}", *options]
    done = subprocess.run(command, env={**os.environ, **password}, capture_output=True, text=True)
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr.strip()[:300])
        if "already exists" in why:
            raise StoreError("the database has tables, which a restore never overwrites; give an empty database")
        raise StoreError(f"{tool} failed: {why}")
