"""`foreshock incidents` and `resume-plan`: incidents of a run, their acknowledgement, switches and checkpoints."""

from typing import Annotated, Any

import typer

from foreshock.cli.errors import CommandError
from foreshock.cli.options import asks_service
from foreshock.cli.output import console, print_json, say, table_of
from foreshock.client import Service

_HEADS_SHOWN = 5
_ORDERS_SHOWN = 5
_CHECKPOINTS_SHOWN = 12


@asks_service
def incidents(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run whose incidents are listed.")],
    acknowledge: Annotated[
        str | None,
        typer.Option(
            metavar="INCIDENT",
            help="Acknowledge the incident with this id, so that others know that you are handling it; needs --reason.",
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Reason, recorded in the audit trail.")] = None,
) -> None:
    """List the incidents of a run: their heads, the steps left, what was done and what to do; and its switches."""
    if (acknowledge is None) != (reason is None):
        raise CommandError("--acknowledge and --reason belong together: pass both")
    if acknowledge is not None and reason is not None:
        client.acknowledge(run, acknowledge, reason=reason)
    found = client.incidents(run)
    if as_json:
        print_json(found)
    else:
        _print_incidents(found, run)
        _print_orders(client.commands(run))


@asks_service
def resume_plan(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run that failed.")],
) -> None:
    """Print the checkpoint to resume a failed run from, the lines that load it, and every checkpoint that is known."""
    plan = client.resume_plan(run)
    if as_json:
        print_json(plan)
        return
    say(plan["sentence"])
    for line in plan["commands"]:
        say(f"  {line}")
    if plan["checkpoints"]:
        rows = [
            {"step": one["step"], "state": one["label"], "keep": "yes" if one["pinned"] else "", "path": one["path"]}
            for one in plan["checkpoints"][:_CHECKPOINTS_SHOWN]
        ]
        console().print(table_of(rows))
        if (more := len(plan["checkpoints"]) - _CHECKPOINTS_SHOWN) > 0:
            say(f"and {more} older; --json lists them all")


def _print_incidents(found: list[dict[str, Any]], run: str) -> None:
    if not found:
        say(f"{run} has no incidents.")
    for incident in found:
        say(
            f"incident {incident['id']}: {incident['state']}, {incident['severity']}, "
            f"since step {incident['opened_step']:,}"
        )
        say(f"  {incident['sentence']}")
        say(f"  Done: {incident['done']}")
        say(f"  To do: {incident['to_do']}")
        for head in incident["heads"][:_HEADS_SHOWN]:
            say(f"  - {head['sentence']}")
        if (more := len(incident["heads"]) - _HEADS_SHOWN) > 0:
            say(f"  and {more} more; --json lists them all")


def _print_orders(commands: list[dict[str, Any]]) -> None:
    """Print the newest switches and proposals, by people and by policy, with the step at which they were applied."""
    for each in [one for one in commands if not one["dry_run"]][:_ORDERS_SHOWN]:
        steps = [answer["step"] for answer in each["ranks"] if answer["outcome"] == "applied"]
        at = f" at step {max(steps):,}" if steps else ""
        undone = ", undone since" if each["undone_by"] else ""
        done = f"{each['state']}{at}{undone}. {each['issued_by']}: {each['reason']}"
        say(f"{each['what']}: {done}")
