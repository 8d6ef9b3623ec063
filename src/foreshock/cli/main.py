"""The command line. Each command is thin: it reads its options, calls one part and turns errors into sentences.

Parts are imported inside the commands, so that a service without torch and a training environment without a web server
both have the same command.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from foreshock import __version__
from foreshock.cli.about import delete, describe
from foreshock.cli.boards import boards
from foreshock.cli.decisions import approve, reject
from foreshock.cli.errors import CommandError, Commands
from foreshock.cli.incidents import incidents, resume_plan
from foreshock.cli.options import AsJson, Url, asks_service
from foreshock.cli.replay import replay
from foreshock.cli.store import audit, store
from foreshock.client import DEFAULT_URL, Service
from foreshock.contract.modes import MODE_NAMES

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="foreshock monitors the attention heads of a training, warns before the loss explodes, and can switch failing "
    "heads to a corrected kernel without a restart.\n\n"
    "Start with [bold]foreshock demo[/bold]. [bold]foreshock doctor[/bold] reports what this machine supports.",
)
app.add_typer(boards, name="dashboards")
app.add_typer(store, name="store")
app.add_typer(audit, name="audit")
app.command()(incidents)
app.command()(resume_plan)
app.command()(approve)
app.command()(reject)
app.command()(describe)
app.command()(delete)
app.command()(replay)
if find_spec("foreshock.cli.research") is not None:  # a checkout: the wheel holds no laboratory and no benchmark
    from foreshock.cli.research.benchmarks import bench
    from foreshock.cli.research.lab import lab

    app.add_typer(lab, name="lab")
    app.add_typer(bench, name="bench")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"foreshock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """See the help of the application."""


@app.command()
def demo(
    train: Annotated[
        bool, typer.Option("--train", help="Train a small GPT here instead; needs PyTorch and some minutes.")
    ] = False,
    steps_per_second: Annotated[
        float | None,
        typer.Option(help="Speed of the recorded runs; 100 by default.", min=0.001),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the live page; 0 takes a free one.")] = 8765,
    seed: Annotated[
        int | None,
        typer.Option(help="With --train: random seed. Default: 8 on a CPU, 2 on a GPU."),
    ] = None,
) -> None:
    """Play recorded failures next to a run that was switched, in two minutes and without PyTorch.

    With --train, train a small GPT three times instead, side by side, until its attention drifts.
    """
    from foreshock.cli.output import console

    if train:
        from foreshock.lab import demo as live

        if steps_per_second is not None:
            raise CommandError("--steps-per-second is for the recorded runs: leave out --train")
        live.main(console(), seed=seed, port=port)
        return
    from foreshock.cli import demo as player

    if seed is not None:
        raise CommandError("--seed is for training: give --train as well")
    pace = player.STEPS_PER_SECOND if steps_per_second is None else steps_per_second
    player.play(console(), port=port, steps_per_second=pace)


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; addresses other than loopback need a token.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    database_url: Annotated[str | None, typer.Option(help="Store: sqlite:///FILE or postgresql://...")] = None,
) -> None:
    """Run the service: it stores runs and shows the live page, the HTTP API and /metrics.

    Every setting is also an environment variable, FORESHOCK_*.
    """
    from foreshock.server.app import serve as serve_app
    from foreshock.server.settings import settings_of

    given: dict[str, Any] = {"host": host, "port": port, "database_url": database_url}
    serve_app(settings_of(**{name: value for name, value in given.items() if value is not None}))


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A function that makes a model, as module:factory; lists what foreshock would monitor in it."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Report what this machine supports, and check attention against a float64 reference."""
    from foreshock.cli import doctor as examination
    from foreshock.cli.output import console

    if model is not None:
        examination.report_model(model, console())
    elif not examination.report(url, console(), as_json=as_json):
        raise typer.Exit(1)


@app.command()
@asks_service
def runs(
    client: Service,
    as_json: bool,
    run: Annotated[str | None, typer.Argument(help="Show only this run, with its layers and warnings.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the list as CSV.")] = False,
) -> None:
    """List the runs that the service knows. Long names are shortened at a terminal, and never in a pipe."""
    from foreshock.cli import output
    from foreshock.cli import runs as text

    if as_csv and (as_json or run is not None):
        raise CommandError("--csv is for the list of runs, in place of --json")
    if as_json:
        output.print_json(list(client.runs()) if run is None else client.run(run))
    elif as_csv:
        text.csv_of_runs(client)
    elif run is None:
        text.list_runs(client, output.console())
    else:
        text.show_run(client, run, output.console())


@app.command()
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
        int, typer.Option(help="Largest number of points; each keeps its minimum and maximum.", min=1)
    ] = 10_000,
) -> None:
    """Print one metric of a run as CSV: step, low, high and last, and worst_head if no --head is given."""
    from foreshock.cli import runs as text
    from foreshock.cli.output import print_csv, print_json

    span = client.series(run, metric, layer=layer, head=head, from_step=from_step, to_step=to_step, max_points=points)
    names, rows = text.points_of(span)
    if as_json:
        found = [dict(zip(names, point, strict=True)) for point in rows]
        print_json({"run": run, "metric": metric, "layer": layer, "head": head, "points": found})
    else:
        print_csv(names, rows)


@app.command()
@asks_service
def switch(
    client: Service,
    as_json: bool,
    run: Annotated[str, typer.Argument(help="Run to switch.")],
    reason: Annotated[str, typer.Option(help="Reason, recorded in the audit trail.")],
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
    dry_run: Annotated[bool, typer.Option(help="Only report what the agent would do.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the agent's answer.")] = 30.0,
) -> None:
    """Switch heads of a running training to another mode and wait for the agent's answer; or undo or stop a switch.

    Exit code 0: done. 3: ordered, and no agent has answered yet. 4: answered, and not done (refused, expired,
    rejected). 1: not ordered.
    """
    from foreshock.cli import runs as text

    order: dict[str, Any] = {"run": run, "reason": reason, "dry_run": dry_run, "wait_seconds": wait}
    one = [given for given in (mode, undo, cancel) if given is not None]
    if len(one) != 1 or (mode is None and (layer is not None or head)):
        raise CommandError(
            "give --mode, with --layer and --head or without them, or give --undo or --cancel without a mode"
        )
    if mode is not None:
        commands = text.switch(client, layer=layer, heads=head, mode=mode, **order)
    elif undo is not None:
        commands = text.undo(client, command=undo, **order)
    else:
        commands = [text.cancel(client, run=run, command=str(cancel), reason=reason)]
    done = ("applied", "dry_run") if cancel is None else ("cancelled",)
    text.finish(commands, as_json=as_json, wait_seconds=wait, done=done)


@app.command()
def diagnose(
    source: Annotated[
        list[str],
        typer.Argument(help="A trace (.xz or .gz), a checkpoint of `lab run`, or module:factory; may be repeated."),
    ],
    state: Annotated[
        list[Path],
        typer.Option(
            help="Weights for the model of module:factory, a file of torch or safetensors or a folder of them; may be "
            "repeated, the oldest first."
        ),
    ] = [],  # noqa: B006
    head: Annotated[list[str], typer.Option(help="Head to look at, as LAYER.HEAD; may be repeated.")] = [],  # noqa: B006
    batches: Annotated[int, typer.Option(help="Number of batches that a model is run on.", min=2)] = 16,
    json: Annotated[Path | None, typer.Option(help="File for every number, as JSON.")] = None,
) -> None:
    """Say whether attention failed, in which head, why, and what to do, from checkpoints or a trace."""
    from foreshock.cli import diagnose as text
    from foreshock.cli.output import console

    text.report(source, console(), states=state, heads=head, batches=batches, json=json)
