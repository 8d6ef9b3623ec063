"""`foreshock runs`, `foreshock export` and `foreshock switch`: what the service knows, and an order to it, as text."""

import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foreshock.cli.errors import CommandError
from foreshock.cli.output import REFUSED, UNANSWERED, console, print_csv, print_json
from foreshock.client import SETTLED, Series, Service
from foreshock.contract.modes import parse_mode


def list_runs(client: Service, out: Console) -> None:
    """A table of every run: what needs a person first, and what has ended last."""
    rows = sorted(client.runs(), key=lambda run: -run["urgency"])
    if not rows:
        out.print('The service has no runs yet. In a training: foreshock.attach(model, run="my-run", url=...)')
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("run", "left"), ("state", "left"), ("severity", "left"), ("step", "right"),
                          ("loss", "right"), ("risk", "right"), ("warnings", "right"),
                          ("policy", "left"), ("heard from", "right")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    now = time.time()
    for run in rows:
        table.add_row(
            run["run"],
            state_of(run, now),
            run["severity"] or "-",
            _text(run["last_step"], "{}"),
            _text(run["loss"], "{:.4f}"),
            _text(run["worst_risk"], "{:.2f}"),
            str(run["active_warnings"]),
            run["policy"] or "-",
            f"{duration(now - run['last_seen_unix_seconds'])} ago",
        )
    out.print(table)
    for run in rows:
        if shared := run.get("shared_ranks"):
            out.print(f"{run['run']}: {shared}", style="yellow", markup=False)


def show_run(client: Service, run: str, out: Console) -> None:
    """One run: its layers, the modes of its heads, and its active warnings in words."""
    detail = client.run(run)
    out.print(
        f"[bold]{detail['run']}[/bold]  {state_of(detail, time.time())}  step {_text(detail['last_step'], '{}')}  "
        f"loss {_text(detail['loss'], '{:.4f}')}  {policy_of(detail)}"
        + (f"  QK-Clip {detail['qk_clip']}" if detail.get("qk_clip") else "")
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "name", "heads", "switched heads", "worst risk"):
        table.add_column(name)
    for layer in detail["layers"]:
        switched = [
            f"{h} {mode}" for h, mode in zip(layer["heads"], layer["modes"], strict=True) if mode not in (None, "plain")
        ]
        risks = [float(risk) for risk in layer["risk"] if risk is not None]
        table.add_row(
            str(layer["layer"]),
            layer["name"],
            str(len(layer["heads"])),
            ", ".join(switched) or "-",
            _text(max(risks, default=None), "{:.2f}"),
        )
    out.print(table)
    show_description(detail, out)
    if shared := detail.get("shared_ranks"):
        out.print(shared, style="yellow", markup=False)
    for warning in detail["warnings"]:
        out.print(f"[yellow]{warning['severity']}[/yellow]  step {warning['step']}: {escape(warning['sentence'])}")
    if not detail["warnings"]:
        out.print("No active warning.")


def state_of(run: dict[str, Any], now: float) -> str:
    """How a run is by now: silent and hung with their time."""
    since = run["condition_since_unix_seconds"]
    return str(run["condition"]) + ("" if since is None else f" {duration(now - since)}")


def duration(seconds: float) -> str:
    """A time in words: 42 s, 16 min, 3 h, 12 days."""
    seconds = max(seconds, 0.0)
    for most, unit, word in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds / 86_400:.0f} days"


def show_description(detail: dict[str, Any], out: Console) -> None:
    """Print the name, tags and notes that people gave a run, where it has them."""
    for word, key in (("called", "display_name"), ("tags", "tags"), ("notes", "notes")):
        if value := detail.get(key):
            out.print(f"{word}: {', '.join(value) if isinstance(value, list) else value}", markup=False)


_SWITCHED = {"head": "its head", "layer": "all heads of its layer", "model": "all heads"}
_AT_A_WARNING = {"auto": "switches", "approve": "proposes to switch"}


def policy_of(detail: Mapping[str, Any]) -> str:
    """The policy, and what a warning does under it."""
    policy, scope = detail["policy"] or "-", detail.get("switch_scope")
    acts = (
        f" (a warning {_AT_A_WARNING[policy]} {_SWITCHED.get(scope, scope)})"
        if scope and policy in _AT_A_WARNING
        else ""
    )
    return f"policy {policy}{acts}"


def _text(value: float | str | None, pattern: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else pattern.format(value)


def csv_of_runs(client: Service) -> None:
    """Every run as CSV, the one heard from last first."""
    columns = (
        "run",
        "status",
        "condition",
        "severity",
        "last_step",
        "loss",
        "worst_risk",
        "active_warnings",
        "policy",
        "last_seen_unix_seconds",
        "display_name",
        "tags",
    )
    rows = (run | {"tags": ", ".join(run.get("tags", []))} for run in client.runs())
    print_csv(columns, ([run.get(column) for column in columns] for run in rows))


def points_of(series: Series) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """The names of the columns of one metric against the step, and its rows."""
    columns = [column.tolist() for column in (series.steps, series.low, series.high, series.last)]
    names = ["step", "low", "high", "last"]
    if series.worst_head is not None:
        names.append("worst_head")
        columns.append([None if math.isnan(head) else int(head) for head in series.worst_head])
    return names, zip(*columns, strict=True)


def switch(
    client: Service,
    *,
    run: str,
    layer: int | None,
    heads: list[int] | None,
    mode: str,
    reason: str,
    dry_run: bool,
    wait_seconds: float,
) -> list[dict[str, Any]]:
    """Order a switch, wait for the agents' answers, and return the command.

    Without `layer` every head of the run is meant, and keeps its own mode beside the ordered one: that takes an order
    for each mode that comes of it. With `layer` and no `heads`, every head of that layer gets this mode alone.
    Raises CommandError for an unknown mode, layer or head.
    """
    try:
        parse_mode(mode)
    except ValueError as error:
        raise CommandError(str(error)) from None
    refs = _head_refs(client, run, layer, heads)
    changes: list[dict[str, Any]] = [{"mode": mode, "heads": refs}]
    if refs is None:  # each head keeps its own mode beside it
        planned = client.switches(run, mode)
        changes = planned["changes"]
        if unchanged := planned["unchanged"]:
            typer.echo(f"{len(unchanged)} heads already have {mode} among their modes, and keep them.", err=True)
    orders = [client.switch(run, each["mode"], reason=reason, heads=each["heads"], dry_run=dry_run) for each in changes]
    return [client.wait(order, wait_seconds) for order in orders]


def undo(
    client: Service, *, run: str, command: str, reason: str, dry_run: bool, wait_seconds: float
) -> list[dict[str, Any]]:
    """Order the modes back that a command changed, wait for the answers, and return the commands.

    `command` is an id, or `last` for the newest switch of the run that was applied and stands. Raises CommandError when
    there is none.
    """
    if command == "last":
        known = client.commands(run)
        standing = [c["id"] for c in known if c["state"] == "applied" and {c["undone_by"], c["undoes"]} == {None}]
        if not standing:
            raise CommandError(f"run {run} has no applied switch to revert; `foreshock runs {run}` shows its modes")
        command = standing[0]
    return [client.wait(one, wait_seconds) for one in client.undo(command, reason=reason, dry_run=dry_run)]


def cancel(client: Service, *, run: str, command: str, reason: str) -> dict[str, Any]:
    """Stop an order that is under way, and return it. `command` is an id, or `last` for the run's newest.

    Raises CommandError when no order of the run is under way.
    """
    if command == "last":
        known = client.commands(run)
        command = next((c["id"] for c in known if c["state"] in ("pending", "delivered")), "")
        if not command:
            raise CommandError(f"run {run} has no order under way; `foreshock runs {run}` shows its modes")
    return client.cancel(command, reason=reason)


def show_commands(commands: list[dict[str, Any]], out: Console, wait_seconds: float) -> None:
    """Print what became of commands, and what the agents answered."""
    for command in commands:
        out.print(f"command {command['id']}: {command['state']}")
        if why := command.get("closed_because"):
            out.print(f"  {why}", markup=False)
        for answer in command["ranks"]:
            for (at_layer, head), before, after in zip(answer["heads"], answer["before"], answer["after"], strict=True):
                out.print(f"  step {answer['step']}: layer {at_layer} head {head}: {before} -> {after}")
            if command["state"] == "cancelled":
                out.print(f"  rank {answer['rank']} had it: {answer['outcome'] or 'no answer yet'}")
            elif answer["outcome"] not in (None, "applied") or (answer["outcome"] and not answer["heads"]):
                out.print(f"  rank {answer['rank']}: {answer['outcome']}: {answer['reason']}", markup=False)
        run = command["run"]
        if command["state"] == "cancelled" and command["ranks"]:
            out.print(f"`foreshock switch {run} --undo {command['id']}` reverts it.")
        if command["state"] not in SETTLED:
            out.print(
                f"No answer within {wait_seconds:g} s. The command stays pending until the run's next batch; "
                f"see `foreshock runs {run}`."
            )


def finish(
    commands: list[dict[str, Any]],
    *,
    as_json: bool,
    wait_seconds: float = 0.0,
    done: Collection[str] = ("applied", "dry_run"),
) -> None:
    """Print the state of commands, and end with the exit status: done, not answered yet, or answered and not done."""
    if as_json:
        print_json({"commands": commands})
    else:
        show_commands(commands, console(), wait_seconds)
    states = {command["state"] for command in commands}
    if not states <= SETTLED:
        raise typer.Exit(UNANSWERED)
    if not states <= set(done):
        raise typer.Exit(REFUSED)


def _head_refs(client: Service, run: str, layer: int | None, heads: list[int] | None) -> list[tuple[int, int]] | None:
    if layer is None:
        if heads:
            raise CommandError("--head was given without --layer; a head is named by both")
        return None
    layers = {entry["layer"]: entry["heads"] for entry in client.run(run)["layers"]}
    if layer not in layers:
        raise CommandError(f"run {run} has no layer {layer}; it has {_ranges(layers)}")
    unknown = sorted(set(heads or []) - set(layers[layer]))
    if unknown:
        raise CommandError(f"layer {layer} has no head {unknown[0]}; it has {_ranges(layers[layer])}")
    return [(layer, head) for head in heads or layers[layer]]


def _ranges(numbers: Any) -> str:
    ordered = sorted(numbers)
    if not ordered:
        return "none"
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
