"""`foreshock store` and `foreshock audit`: a store copied and put back, its audit trail exported and verified."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import CommandError, Commands
from foreshock.cli.options import AsJson, Token, TokenFile, Url
from foreshock.client import DEFAULT_URL, Service, given_token

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
    as_json: AsJson = False,
) -> None:
    """Copy the store into one file while the service runs. PostgreSQL needs pg_dump."""
    from foreshock.cli.output import print_result
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
    """Show what the store holds, and verify its whole audit trail. The service may run."""
    _print_held(_url(database_url), as_json=as_json)


def _print_held(url: str, *, as_json: bool) -> None:
    from foreshock.cli.output import print_result
    from foreshock.server.store import backup

    held = asyncio.run(backup.examine(url))
    print_result(asdict(held), str(held), as_json=as_json)


@audit.command("export")
def audit_export(
    file: Export,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Append the new rows of the audit trail to FILE, after verifying that its last row stands and that they follow it.

    The token needs the scope `read` for every run.
    """
    from foreshock.cli.output import print_result
    from foreshock.server.store.audit import Chain, read_line

    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        raise CommandError(f"the last row of {file} was not written whole; delete that line and export again")
    chain = Chain(read_line(lines[-1])) if lines else Chain()
    before = chain.sequence
    with Service(url, given_token(token, token_file), timeout_seconds=30.0) as client:
        if lines:
            still = client.audit_export(before - 1).splitlines()
            chain.stands(read_line(still[0]) if still else None)
        while rows := client.audit_export(chain.sequence):
            for line in rows.splitlines():
                chain.follow(read_line(line))
            with file.open("ab") as out:  # no earlier, so that an export that fails leaves no empty trail
                out.write(rows)
    new, last = chain.sequence - before, chain.sequence
    done = {"file": str(file), "appended": new, "rows": last, "hash": chain.hash}
    print_result(done, f"{new} rows appended to {file}, which ends with row {last}", as_json=as_json)


@audit.command("verify")
def audit_verify(file: Export, as_json: AsJson = False) -> None:
    """Verify the hash chain of an export from its first row. Needs no service."""
    from foreshock.cli.output import print_result
    from foreshock.server.store.audit import Chain, read_line

    chain = Chain()
    with file.open("rb") as lines:
        for line in lines:
            chain.follow(read_line(line))
    if chain.sequence == 0:
        raise CommandError(f"{file} holds no row, so nothing was verified; give a file that `audit export` wrote")
    done = {"file": str(file), "rows": chain.sequence, "hash": chain.hash}
    print_result(done, f"{chain.sequence} rows, all verified; the last hash is {chain.hash}", as_json=as_json)
