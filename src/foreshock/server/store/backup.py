"""A copy of the store that is consistent in itself, made while ingest goes on, and the way back from it."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
            tool, database = _postgresql(address, "pg_dump")
            _call([*tool, "--format=custom", "--no-owner", "--no-privileges", f"--file={partial}", database], address)
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
        tool, database = _postgresql(address, "pg_restore")
        options = ["--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges", f"--dbname={database}"]
        _call([*tool, *options, str(file)], address)


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


@dataclass(frozen=True)
class Held:
    """What a store holds."""

    runs: int
    batches: int
    audit_rows: int

    def __str__(self) -> str:
        return f"{self.runs} runs, {self.batches} batches, {self.audit_rows} rows of the audit trail"


async def examine(url: str) -> Held:
    """What a store holds. Raises StoreError where there is none."""
    if (file := file_of(address_of(url))) and not file.is_file():  # SQLite would make one
        raise StoreError(f"there is no file {file}")
    store = Store(url)
    try:
        await store.check_readable()  # what is counted is there in every schema that is known
        return await store.read(_count)
    except SQLAlchemyError as error:
        raise unusable(error, url) from None
    finally:
        await store.close()


def _count(connection: Connection) -> Held:
    tables = runs, batches, audit
    return Held(*(connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables))


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


def _postgresql(url: URL, tool: str) -> tuple[list[str], str]:
    found = shutil.which(tool)
    if found is None:
        raise StoreError(f"{tool} is not on the PATH; it comes with PostgreSQL's client programs")
    # Without its password, which would stand in the list of processes. (URL.set cannot take a password away.)
    shown = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    return [found], shown.render_as_string(hide_password=False)


def _call(command: list[str], url: URL) -> None:
    password = {"PGPASSWORD": str(url.password)} if url.password is not None else {}
    done = subprocess.run(command, env={**os.environ, **password}, capture_output=True, text=True)
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr.strip()[:300])
        if "already exists" in why:
            raise StoreError("the database already holds tables, and a restore overwrites none; give an empty database")
        raise StoreError(f"{Path(command[0]).name} failed: {why}")
