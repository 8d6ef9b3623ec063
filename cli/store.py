"""`foreshock store` and `foreshock audit`: a store copied and put back, its audit trail exported and verified."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import Commands
from foreshock.cli.options import Token, Url
from foreshock.client import DEFAULT_URL, Service

store = typer.Typer(cls=Commands, no_args_is_help=True, help="Back up, restore and check the service's store.")
audit = typer.Typer(cls=Commands, no_args_is_help=True, help="Export the audit trail, and verify an export.")

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
) -> None:
    """Copy the store into one file while the service runs. PostgreSQL needs pg_dump."""
    from foreshock.server.store import backup

    backup.backup(_url(database_url), file)
    typer.echo(f"{file}: {file.stat().st_size} bytes")


@store.command("restore")
def store_restore(
    file: Annotated[Path, typer.Argument(help="A file that `foreshock store backup` wrote.")],
    database_url: DatabaseUrl = None,
) -> None:
    """Restore a backup into a new SQLite file or an empty PostgreSQL database. Stop the service first."""
    from foreshock.server.store import backup

    url = _url(database_url)
    backup.restore(file, url)
    typer.echo(asyncio.run(backup.examine(url)))


@store.command("check")
def store_check(database_url: DatabaseUrl = None) -> None:
    """Show what the store holds, and verify its whole audit trail. The service may run."""
    from foreshock.server.store import backup

    typer.echo(asyncio.run(backup.examine(_url(database_url))))


@audit.command("export")
def audit_export(
    file: Export,
    url: Url = DEFAULT_URL,
    token: Token = None,
) -> None:
    """Append the new rows of the audit trail to FILE, after verifying that they follow the last row of the file.

    The token needs the scope `read` for every run.
    """
    from foreshock.server.store.audit import Chain, read_line

    lines = file.read_bytes().splitlines() if file.exists() else []
    chain = Chain(read_line(lines[-1])) if lines else Chain()
    before = chain.sequence
    with Service(url, token, timeout_seconds=30.0) as client, file.open("ab") as out:
        while rows := client.audit_export(chain.sequence):
            for line in rows.splitlines():
                chain.follow(read_line(line))
            out.write(rows)
    typer.echo(f"{chain.sequence - before} rows appended to {file}, which ends with row {chain.sequence}")


@audit.command("verify")
def audit_verify(file: Export) -> None:
    """Verify the hash chain of an export from its first row. Needs no service."""
    from foreshock.server.store.audit import Chain, read_line

    chain = Chain()
    with file.open("rb") as lines:
        for line in lines:
            chain.follow(read_line(line))
    typer.echo(f"{chain.sequence} rows, all verified; the last hash is {chain.hash}")
