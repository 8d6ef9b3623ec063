"""`foreshock describe` and `foreshock delete`: what people say of a run, and its end."""

from typing import Annotated

import typer

from foreshock.cli.errors import CommandError
from foreshock.cli.options import asks_service
from foreshock.client import Service


@asks_service
def describe(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run to describe.")],
    name: Annotated[
        str | None, typer.Option(help='Display name; "" removes it. Agents and alerts use the name of the run.')
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Add this tag; may be repeated.")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="Remove this tag; may be repeated.")] = None,
    note: Annotated[str | None, typer.Option(help='Notes, which replace the present ones; "" removes them.')] = None,
) -> None:
    """Give a run a display name, tags and notes. Needs a token with the scope `act`."""
    from foreshock.cli.output import console, print_json
    from foreshock.cli.runs import show_description

    if name is None and note is None and not tag and not untag:
        raise CommandError("nothing to change: pass --name, --tag, --untag or --note")
    tags = None
    if tag or untag:
        had = client.run(run).get("tags", [])
        if missing := sorted(set(untag or ()) - set(had)):
            raise CommandError(f"run {run} has no tag {missing[0]!r}; it has {', '.join(had) or 'none'}")
        tags = sorted((set(had) | set(tag or ())) - set(untag or ()))
    detail = client.describe(run, display_name=name, tags=tags, notes=note)
    if as_json:
        print_json(detail)
    else:
        show_description(detail, console())


@asks_service
def delete(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run to delete, with all its data.")],
    reason: Annotated[str, typer.Option(help="Reason, recorded in the audit trail.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a run that no longer trains. This is final. Needs a token with the scope `delete`."""
    from foreshock.cli.output import print_result

    step = client.run(run)["last_step"]
    if not yes:
        session = client.get("/v1/session")  # nobody is asked to confirm what would be refused
        if not {"delete", "admin"} & set(session["scopes"]):
            raise CommandError(f"the token {session['name']} lacks the scope 'delete'; give another with --token")
        question = f"Delete run {run} with its {step or 0:,} steps? It cannot be taken back."
        typer.confirm(question, abort=True, err=as_json)
    client.delete(run, reason=reason)
    print_result({"deleted": run, "last_step": step}, f"Run {run} is deleted.", as_json=as_json)
