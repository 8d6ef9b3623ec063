"""`foreshock runs`, `export`, `describe` and `delete`: show, describe and delete the runs of a service."""

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from foreshock.cli.errors import CommandError
from foreshock.cli.options import asks_service
from foreshock.cli.output import cell, console, print_csv, print_json, print_result, say, table_of
from foreshock.client import Service

_SWITCHED = {"head": "its head", "layer": "all heads of its layer", "model": "all heads"}
_AT_A_WARNING = {"auto": "switches", "approve": "proposes to switch"}


@asks_service
def runs(
    client: Service,
    as_json: bool,
    run: Annotated[str | None, typer.Argument(help="Show only this run, with its layers and warnings.")] = None,
) -> None:
    """List the runs that the service knows. Long names are shortened at a terminal, and never in a pipe."""
    if as_json:
        print_json(list(client.runs()) if run is None else client.run(run))
    elif run is None:
        _print_runs(sorted(client.runs(), key=lambda each: -each["urgency"]))
    else:
        _print_run(client.run(run))


@asks_service
def export(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run to read.")],
    metric: Annotated[str, typer.Argument(help="A metric by its key, such as run.loss.")],
    layer: Annotated[int | None, typer.Option(help="Layer, for a metric of heads.")] = None,
    head: Annotated[
        int | None, typer.Option(help="Head of that layer; by default the worst head at each point.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="First step.", min=0)] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step.", min=0)] = None,
    points: Annotated[
        int, typer.Option(help="Largest number of points; each keeps its minimum and maximum.", min=1, max=10_000)
    ] = 10_000,
) -> None:
    """Print one metric of a run as CSV: step, low, high and last, and worst_head if no --head is given."""
    span = client.series(run, metric, layer=layer, head=head, from_step=from_step, to_step=to_step, max_points=points)
    columns = {"step": span.steps.tolist(), "low": span.low.tolist(), "high": span.high.tolist()}
    columns["last"] = span.last.tolist()
    if span.worst_head is not None:
        columns["worst_head"] = [None if math.isnan(worst) else int(worst) for worst in span.worst_head]
    rows = zip(*columns.values(), strict=True)
    if as_json:
        found = [dict(zip(columns, point, strict=True)) for point in rows]
        print_json({"run": run, "metric": metric, "layer": layer, "head": head, "points": found})
    else:
        print_csv(list(columns), rows)


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
        _print_description(detail)


@asks_service
def delete(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run to delete, with all its data.")],
    reason: Annotated[str, typer.Option(help="Reason, recorded in the audit trail.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a run that no longer trains. This is final. Needs a token with the scope `delete`."""
    step = client.run(run)["last_step"]
    if not yes:
        session = client.get("/v1/session")  # do not ask for confirmation if the service would refuse
        if not {"delete", "admin"} & set(session["scopes"]):
            raise CommandError(f"the token {session['name']} lacks the scope 'delete'; use another one with --token")
        question = f"Delete run {run} with its {step or 0:,} steps? This cannot be undone."
        typer.confirm(question, abort=True, err=as_json)
    client.delete(run, reason=reason)
    print_result({"deleted": run, "last_step": step}, f"Run {run} is deleted.", as_json=as_json)


def _print_runs(rows: list[dict[str, Any]]) -> None:
    """Print a table of all runs, in the given order (the most urgent first)."""
    if not rows:
        say('The service has no runs yet. In a training: foreshock.attach(model, run="my-run", url=...)')
        return
    now = time.time()
    shown = [
        {
            "run": run["run"],
            "state": state_of(run, now),
            "severity": run["severity"],
            "step": run["last_step"],
            "loss": run["loss"],
            "risk": run["worst_risk"],
            "warnings": run["active_warnings"],
            "policy": run["policy"],
            "heard from": f"{_duration(now - run['last_seen_unix_seconds'])} ago",
        }
        for run in rows
    ]
    console().print(table_of(shown))
    for run in rows:
        if shared := run.get("shared_ranks"):
            say(f"{run['run']}: {shared}")


def _print_run(run: dict[str, Any]) -> None:
    """Print one run: its layers, the modes of its heads, and its active warnings."""
    say(
        f"{run['run']}  {state_of(run, time.time())}  step {cell(run['last_step'])}  "
        f"loss {cell(run['loss'])}  {policy_of(run)}" + (f"  QK-Clip {run['qk_clip']}" if run.get("qk_clip") else "")
    )
    layers = []
    for layer in run["layers"]:
        modes = zip(layer["heads"], layer["modes"], strict=True)
        switched = [f"{head} {mode}" for head, mode in modes if mode not in (None, "plain")]
        own = {"layer": layer["layer"], "name": layer["name"], "heads": len(layer["heads"])}
        worst = max((float(risk) for risk in layer["risk"] if risk is not None), default=None)
        layers.append(own | {"switched heads": ", ".join(switched) or None, "worst risk": worst})
    console().print(table_of(layers))
    _print_description(run)
    if shared := run.get("shared_ranks"):
        say(shared)
    for warning in run["warnings"]:
        say(f"{warning['severity']}  step {warning['step']}: {warning['sentence']}")
    if not run["warnings"]:
        say("No active warning.")


def _print_description(run: dict[str, Any]) -> None:
    """Print the display name, tags and notes of a run, if it has them."""
    for word, key in (("called", "display_name"), ("tags", "tags"), ("notes", "notes")):
        if value := run.get(key):
            say(f"{word}: {', '.join(value) if isinstance(value, list) else value}")


def state_of(run: Mapping[str, Any], now: float) -> str:
    """Return the condition of a run, with its duration for silent and hung runs."""
    since = run["condition_since_unix_seconds"]
    return str(run["condition"]) + ("" if since is None else f" {_duration(now - since)}")


def _duration(seconds: float) -> str:
    """Format a duration: 42 s, 16 min, 3 h, 12 days."""
    seconds = max(seconds, 0.0)
    for most, unit, word in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds / 86_400:.0f} days"


def policy_of(run: Mapping[str, Any]) -> str:
    """Return the policy of a run, with the effect of a warning under it."""
    policy, scope = run["policy"] or "-", run.get("switch_scope")
    if not scope or policy not in _AT_A_WARNING:
        return f"policy {policy}"
    return f"policy {policy} (a warning {_AT_A_WARNING[policy]} {_SWITCHED.get(scope, scope)})"
