"""`foreshock approve` and `foreshock reject`: the answer of a person to a proposed switch."""

from typing import Annotated, Any

import typer

from foreshock.cli.errors import CommandError
from foreshock.cli.options import asks_service
from foreshock.client import Service
from foreshock.contract.wire import HeadRef

Run = Annotated[str, typer.Argument(help="Run whose proposed switch you answer.")]
Reason = Annotated[str, typer.Option(help="Reason, recorded in the audit trail.")]
Proposal = Annotated[
    str | None,
    typer.Option("--command", metavar="COMMAND", help="Id of the proposal; needed only if there are several."),
]


@asks_service
def approve(
    client: Service,
    as_json: bool,
    run: Run,
    reason: Reason,
    command: Proposal = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the agent's answer.")] = 30.0,
) -> None:
    """Approve the proposed switch, and wait for the agent's answer. Exit codes as for `switch`."""
    from foreshock.cli.runs import finish

    done = client.wait(client.approve(_waiting(client, run, command), reason=reason), wait)
    finish([done], as_json=as_json, wait_seconds=wait)


@asks_service
def reject(
    client: Service,
    as_json: bool,
    run: Run,
    reason: Reason,
    command: Proposal = None,
) -> None:
    """Reject the proposed switch. It is not proposed again until its heads have a new warning."""
    from foreshock.cli.runs import finish

    finish([client.reject(_waiting(client, run, command), reason=reason)], as_json=as_json, done=("rejected",))


def _waiting(client: Service, run: str, command: str | None) -> str:
    """The id of the proposal that is meant. Raises CommandError if none waits, or several and none is named."""
    waiting: dict[str, Any] = {str(one["id"]): one for one in client.commands(run) if one["state"] == "proposed"}
    if command is None and len(waiting) == 1:
        return next(iter(waiting))
    if command in waiting:
        return str(command)
    known = "; ".join(f"--command {name} ({what(one['heads'])} to {one['mode']})" for name, one in waiting.items())
    if command is not None:
        raise CommandError(f"no proposal {command} waits in run {run}" + (f"; give {known}" if known else ""))
    raise CommandError(
        f"several proposals wait in run {run}: give {known}" if known else f"no proposal waits in run {run}"
    )


def what(heads: list[HeadRef] | None) -> str:
    """The heads of an order, at most two by name."""
    if heads is None:
        return "every head"
    named = ", ".join(f"layer {layer} head {head}" for layer, head in heads[:2])
    return named + (f" and {len(heads) - 2} more" if len(heads) > 2 else "")
