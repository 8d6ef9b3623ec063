"""`foreshock switch`, `approve` and `reject`: send commands to a running training, and report their outcome."""

from collections.abc import Callable, Collection
from typing import Annotated, Any, Final

import typer

from foreshock.cli.errors import CommandError
from foreshock.cli.options import asks_service
from foreshock.cli.output import print_json, say
from foreshock.client import SETTLED, Service
from foreshock.contract.modes import MODE_NAMES
from foreshock.contract.orders import OPEN
from foreshock.contract.wire import HeadRef

UNANSWERED, REFUSED = 3, 4
"""Exit codes: not answered yet; answered, but not done. Exit code 1 is any other error, 2 wrong usage."""
_DONE: Final = ("applied", "dry_run")

Reason = Annotated[str, typer.Option(help="Reason, recorded in the audit trail.")]
Wait = Annotated[float, typer.Option(help="Seconds to wait for the agent's answer.", min=0.0, metavar="<float>")]
Run = Annotated[str, typer.Argument(help="Run whose proposed switch you answer.")]
Proposal = Annotated[
    str | None,
    typer.Option("--command", metavar="COMMAND", help="Id of the proposal; needed only if there are several."),
]


@asks_service
def switch(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run to switch.")],
    reason: Reason,
    mode: Annotated[
        str | None, typer.Option(help=f"New mode: plain, {', '.join(MODE_NAMES)}, or several joined by +.")
    ] = None,
    undo: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Undo a switch instead: the id of its command, or `last`.")
    ] = None,
    cancel: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Cancel a pending command instead: its id, or `last`.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer to switch; by default all layers.")] = None,
    head: Annotated[
        list[int] | None, typer.Option(help="Head of that layer; may be repeated. By default all heads.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Report what the agent would do, and change nothing.")] = False,
    wait: Wait = 30.0,
) -> None:
    """Switch heads of a running training to another mode and wait for the agent's answer; or undo or stop a switch.

    Exit code 0: done. 3: sent, but not answered by an agent yet. 4: answered, but not done (refused, expired,
    rejected). 1: not sent.
    """
    if [mode, undo, cancel].count(None) != 2 or (mode is None and (layer is not None or head)):
        raise CommandError("use --mode, with or without --layer and --head; or --undo or --cancel without a mode")
    if cancel is not None and dry_run:
        raise CommandError("--dry-run is for a switch or --undo: leave it out")
    if mode is not None:
        changes = _changes(client, run, mode, layer, head)
        orders = [client.switch(run, name, reason=reason, heads=heads, dry_run=dry_run) for name, heads in changes]
    elif undo is not None:
        command = _newest(client, run, undo, _stands, "applied switch to revert")
        orders = client.undo(command, reason=reason, dry_run=dry_run)
    else:
        command = _newest(client, run, str(cancel), lambda one: one["state"] in OPEN, "pending command")
        orders = [client.cancel(command, reason=reason)]
    finish(
        client, orders, as_json=as_json, wait=wait, done=("applied", "dry_run") if cancel is None else ("cancelled",)
    )


@asks_service
def approve(
    client: Service, as_json: bool, run: Run, reason: Reason, command: Proposal = None, wait: Wait = 30.0
) -> None:
    """Approve the proposed switch, and wait for the agent's answer. Exit codes as for `switch`."""
    finish(client, [client.approve(_waiting(client, run, command), reason=reason)], as_json=as_json, wait=wait)


@asks_service
def reject(client: Service, as_json: bool, run: Run, reason: Reason, command: Proposal = None) -> None:
    """Reject the proposed switch. It is not proposed again until its heads have a new warning."""
    orders = [client.reject(_waiting(client, run, command), reason=reason)]
    finish(client, orders, as_json=as_json, wait=0.0, done=("rejected",))


ORDERS: Final = (switch, approve, reject)
"""The commands of this module."""


def _changes(
    client: Service, run: str, mode: str, layer: int | None, heads: list[int] | None
) -> list[tuple[str, list[HeadRef]]]:
    """Return the commands for a switch to `mode`, as pairs of a resulting mode and its heads.

    Without `layer`, `mode` is added to the present mode of every head of the run. With `layer`, the given `heads`, by
    default all heads of that layer, get only `mode`. Raises CommandError for an unknown layer.
    """
    if layer is None:
        if heads:
            raise CommandError("--head needs --layer: a head has both numbers")
        planned = client.switches(run, mode)
        if unchanged := planned["unchanged"]:
            typer.echo(f"{len(unchanged)} heads already combine {mode} with other modes and do not change.", err=True)
        return [(each["mode"], each["heads"]) for each in planned["changes"]]
    known = [head for entry in client.run(run)["layers"] if entry["layer"] == layer for head in entry["heads"]]
    if not known:
        raise CommandError(f"run {run} has no layer {layer}; `foreshock runs {run}` lists them")
    return [(mode, [(layer, head) for head in heads or known])]


def _stands(command: dict[str, Any]) -> bool:
    changed = any(answer["before"] != answer["after"] for answer in command["ranks"])
    return command["state"] == "applied" and changed and command["undone_by"] is None and command["undoes"] is None


def _newest(client: Service, run: str, command: str, fits: Callable[[dict[str, Any]], bool], words: str) -> str:
    """Return `command`, or for `last` the id of the newest command that `fits`.

    Raises CommandError if there is none, or if `command` is one of another run.
    """
    if command != "last":
        if (owner := client.command(command)["run"]) != run:
            raise CommandError(f"command {command} belongs to run {owner}; name that run, or a command of {run}")
        return command
    found = next((str(one["id"]) for one in client.commands(run) if fits(one)), None)
    if found is None:
        raise CommandError(f"run {run} has no {words}; `foreshock runs {run}` shows its modes")
    return found


def _waiting(client: Service, run: str, command: str | None) -> str:
    """Return the id of the proposal to answer; CommandError if there is none, or several and `command` is None."""
    waiting: dict[str, Any] = {str(one["id"]): one for one in client.commands(run) if one["state"] == "proposed"}
    if command is None and len(waiting) == 1:
        return next(iter(waiting))
    if command in waiting:
        return str(command)
    known = "; ".join(f"--command {name} ({one['what']})" for name, one in waiting.items())
    if command is not None:
        raise CommandError(f"no proposal {command} waits in run {run}" + (f"; give {known}" if known else ""))
    raise CommandError(
        f"several proposals wait in run {run}: give {known}" if known else f"no proposal waits in run {run}"
    )


def finish(
    client: Service,
    orders: list[dict[str, Any]],
    *,
    as_json: bool,
    wait: float,
    done: Collection[str] = _DONE,
) -> None:
    """Wait for answers to commands, print their outcome, and exit with UNANSWERED or REFUSED if not all are done."""
    commands = [client.wait(order, wait) for order in orders]
    if as_json:
        print_json({"commands": commands})
    else:
        for command in commands:
            print_command(command, wait)
    states = {command["state"] for command in commands}
    if not states <= SETTLED:
        raise typer.Exit(UNANSWERED)
    if not states <= set(done):
        raise typer.Exit(REFUSED)


def print_command(command: dict[str, Any], waited: float) -> None:
    """Print the outcome of a command and the answers of the agents."""
    run, state = command["run"], command["state"]
    say(f"command {command['id']}: {state}")
    if why := command.get("closed_because"):
        say(f"  {why}")
    for answer in command["ranks"]:
        for (layer, head), before, after in zip(answer["heads"], answer["before"], answer["after"], strict=True):
            say(f"  step {answer['step']}: layer {layer} head {head}: {before} -> {after}")
        if state == "cancelled":
            say(f"  rank {answer['rank']} had it: {answer['outcome'] or 'no answer yet'}")
        elif answer["outcome"] not in (None, "applied") or (answer["outcome"] and not answer["heads"]):
            say(f"  rank {answer['rank']}: {answer['outcome']}: {answer['reason']}")
    if state == "cancelled" and command["ranks"]:
        say(f"`foreshock switch {run} --undo {command['id']}` reverts it.")
    if state not in SETTLED:
        say(
            f"No answer within {waited:g} s. The command stays pending until the agent receives it with its next "
            f"batch, or until it expires; `foreshock incidents {run}` shows its state."
        )
