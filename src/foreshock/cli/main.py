"""The command line. Each command is thin: it reads its options, calls one module and reports errors as sentences.

Modules are imported inside the commands, so that the command line works on a service host without PyTorch and in a
training environment without a web server.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from foreshock import __version__
from foreshock.cli.boards import boards
from foreshock.cli.errors import CommandError, Commands
from foreshock.cli.incidents import incidents, resume_plan
from foreshock.cli.options import AsJson, Url
from foreshock.cli.orders import ORDERS
from foreshock.cli.output import console
from foreshock.cli.replay import replay
from foreshock.cli.runs import delete, describe, export, runs
from foreshock.cli.store import audit, store
from foreshock.client import DEFAULT_URL

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
for command in (incidents, resume_plan, *ORDERS, describe, delete, replay, runs, export):
    app.command()(command)
if find_spec("foreshock.cli.research") is not None:  # only in a checkout: the wheel does not contain them
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
    """Handle the options of the application; its help is above."""


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
        typer.Option(help="With --train: random seed; 8 by default."),
    ] = None,
) -> None:
    """Play recorded failures next to a run that was switched, in two minutes and without PyTorch.

    With --train, train a small GPT three times instead, side by side, until its attention drifts.
    """
    if train:
        from foreshock.lab import demo as live

        if steps_per_second is not None:
            raise CommandError("--steps-per-second is for the recorded runs: leave out --train")
        live.main(console(), seed=seed, port=port)
        return
    from foreshock.cli import demo as player

    if seed is not None:
        raise CommandError("--seed is for training: add --train")
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

    if model is not None:
        examination.report_model(model, console())
    elif not examination.report(url, console(), as_json=as_json):
        raise typer.Exit(1)


@app.command()
def diagnose(
    source: Annotated[
        list[str],
        typer.Argument(help="A trace (.xz or .gz) or module:factory; may be repeated."),
    ],
    state: Annotated[
        list[str],
        typer.Option(help="A checkpoint for module:factory to load; may be repeated, the oldest first."),
    ] = [],  # noqa: B006
    batches: Annotated[int, typer.Option(help="Number of batches that a model is run on.", min=2)] = 16,
    json: Annotated[Path | None, typer.Option(help="File for every number, as JSON.")] = None,
) -> None:
    """Say whether attention failed, in which head, why, and what to do, from checkpoints or a trace."""
    from foreshock.cli import diagnose as text

    text.report(source, console(), states=state, batches=batches, json=json)
