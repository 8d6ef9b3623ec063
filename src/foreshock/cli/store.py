"""`foreshock store` and `foreshock audit`: back up, restore and check a store, and export its audit trail."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import CommandError, Commands
from foreshock.cli.options import AsJson, asks_service
from foreshock.cli.output import print_result
from foreshock.client import Service

store = typer.Typer(cls=Commands, no_args_is_help=True, help="Back up, restore and check the service's store.")
audit = typer.Typer(cls=Commands, no_args_is_help=True, help="Export the audit trail.")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="Address of the store; by default FORESHOCK_DATABASE_URL or FORESHOCK_DATABASE_URL_FILE."),
]
Export = Annotated[Path, typer.Argument(help="File of JSON lines, one row each, the oldest first.")]


def _url(given: str | None) -> str:
    from foreshock.server.settings import settings_of

    return given or settings_of().database_url


@store.command("backup")
def store_backup(
    file: Annotated[Path, typer.Argument(help="A new file; it appears when it is complete.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Copy the store into one file while the service runs. PostgreSQL needs pg_dump."""
    from foreshock.server.store import backup

    backup.backup(_url(database_url), file)
    size = file.stat().st_size
    print_result({"file": str(file), "bytes": size}, f"{file}: {size} bytes", as_json=as_json)


@store.command("restore")
def store_restore(
    file: Annotated[Path, typer.Argument(help="A file that `foreshock store backup` wrote.")],
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into a new SQLite file or an empty PostgreSQL database. Stop the service first."""
    from foreshock.server.store import backup

    url = _url(database_url)
    backup.restore(file, url)
    _print_held(url, as_json=as_json)


@store.command("check")
def store_check(database_url: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """Show what the store contains. The service may run."""
    _print_held(_url(database_url), as_json=as_json)


def _print_held(url: str, *, as_json: bool) -> None:
    from foreshock.server.store import backup

    held = asyncio.run(backup.examine(url))
    said = f"{held['runs']} runs, {held['batches']} batches, {held['audit_rows']} rows of the audit trail"
    print_result(held, said, as_json=as_json)


@audit.command("export")
@asks_service
def audit_export(client: Service, as_json: bool, file: Export) -> None:
    """Append the new rows of the audit trail to FILE: JSON lines, the oldest first.

    The token needs the scope `read` for every run.
    """
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        raise CommandError(f"the last row of {file} was not written whole; delete that line and export again")
    try:
        before = last = int(json.loads(lines[-1])["sequence"]) if lines else 0
    except (ValueError, TypeError, KeyError):
        raise CommandError(f"the last line of {file} is not a row of the audit trail; choose another file") from None
    if lines and client.audit_export(before - 1).splitlines(keepends=True)[:1] != lines[-1:]:
        raise CommandError(
            f"the service's row {before} is missing or differs from that in {file}: somebody changed the audit "
            "trail, or this is another store or an older backup; export to a new file"
        )
    while rows := client.audit_export(last):
        with file.open("ab") as out:  # opened only now, so that a failed export does not leave an empty file
            out.write(rows)
        last = json.loads(rows.splitlines()[-1])["sequence"]
    done = {"file": str(file), "appended": last - before, "rows": last}
    print_result(done, f"{last - before} rows appended to {file}, which ends with row {last}", as_json=as_json)
