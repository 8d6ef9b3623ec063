"""`foreshock incidents`: what is wrong with a run, one entry for each incident, and that somebody looks after it."""

from typing import Annotated, Any

import typer
from rich.console import Console

from foreshock.cli.errors import CommandError
from foreshock.cli.options import AsJson, Token, TokenFile, Url
from foreshock.client import DEFAULT_URL, Service, given_token

_HEADS_SHOWN = 5


def incidents(
    run: Annotated[str, typer.Argument(help="Run to look at.")],
    acknowledge: Annotated[
        str | None,
        typer.Option(
            metavar="INCIDENT",
            help="Acknowledge the incident with this id, so that others know that you look after it; needs --reason.",
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="Why you acknowledge it; it is recorded in the audit trail.")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """List the incidents of a run: their heads, the steps left, what was done and what to do."""
    from foreshock.cli.output import console, print_json

    if (acknowledge is None) != (reason is None):
        raise CommandError("--acknowledge names the incident and --reason says why; give both or neither")
    with Service(url, given_token(token, token_file)) as client:
        if acknowledge is not None and reason is not None:
            client.acknowledge(run, acknowledge, reason=reason)
        found = client.incidents(run)
        if as_json:
            print_json(found)
        else:
            _print_incidents(found, run, console())


def _print_incidents(found: list[dict[str, Any]], run: str, console: Console) -> None:
    if not found:
        console.print(f"{run} has no incident.", highlight=False)
    for incident in found:
        console.print(
            f"[bold]{incident['id']}[/bold]  {' and '.join(incident['causes'])}  {incident['state']}  "
            f"{incident['severity']}  since step {incident['opened_step']}",
            highlight=False,
        )
        for text in (incident["sentence"], incident["done"], incident["to_do"]):
            if text:
                console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)
        for head in incident["heads"][:_HEADS_SHOWN]:
            console.print(f"  - {head['sentence']}", highlight=False, markup=False, soft_wrap=True)
        if (more := len(incident["heads"]) - _HEADS_SHOWN) > 0:
            console.print(f"  and {more} more; --json lists them all", highlight=False)
