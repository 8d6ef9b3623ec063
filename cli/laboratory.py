"""`foreshock replay`, `foreshock lab ...` and `foreshock bench ...` as text on the terminal."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foreshock.contract import wire
from foreshock.lab.recipes import ARMS, RECIPES, find_arm, find_recipe
from foreshock.lab.replay import replay
from foreshock.lab.score import lab_score
from foreshock.lab.service import local_service

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def play(
    trace: Path,
    console: Console,
    *,
    url: str | None,
    token: str | None,
    run: str | None,
    port: int,
    steps_per_second: float | None,
    offline: bool,
) -> None:
    """Replay a trace into `url`, into a service of its own, or (offline) onto the terminal alone."""
    if not trace.is_file():
        raise ValueError(f"there is no trace at {trace}")
    with ExitStack() as stack:
        own = url is None and not offline
        if own:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-replay-"))
            url = stack.enter_context(local_service(Path(directory), port))
        if url is not None:
            console.print(f"Live page: {url}/", soft_wrap=True)

        def tell(event: wire.Event) -> None:
            if isinstance(event, wire.Verdict) and event.state != "updated":
                console.print(f"[bold]step {event.step:>6}[/bold]  {event.state}: {event.sentence}", highlight=False)
            elif isinstance(event, wire.Switched):
                heads = ", ".join(f"layer {layer} head {head}" for layer, head in event.heads)
                text = f"{heads}: {event.outcome}, {', '.join(sorted(set(event.after)))}"
                console.print(f"[bold]step {event.step:>6}[/bold]  {text}", highlight=False)

        name = replay(trace, url=url, token=token, run=run, steps_per_second=steps_per_second, on_event=tell)
        console.print(f"{trace.name} was played" + (f" as run {name}." if url else "."))
        if own and console.is_terminal and sys.stdin.isatty():
            console.input("The live page stays up until you press Enter. ")


def list_recipes(console: Console) -> None:
    """Every recipe and arm, in words and numbers."""
    for recipe in RECIPES.values():
        shape = recipe.model
        console.print(f"[bold]{recipe.name}[/bold]  {recipe.summary}")
        console.print(
            f"  {shape.layers} layers, {shape.heads} heads, width {shape.width}, context {shape.context}, batch "
            f"{recipe.batch}, learning rate {recipe.learning_rate:g}, {recipe.steps} steps\n"
        )
    console.print(f"arms: {', '.join(ARMS)}")


def run(
    recipe_name: str, console: Console, *, arm_name: str, seed: int, steps: int | None, trace: Path, url: str | None
) -> None:
    """Train one arm of a recipe and write its trace."""
    from foreshock.lab.run import lab_run

    recipe, arm = find_recipe(recipe_name), find_arm(arm_name)
    with Progress(*_COLUMNS, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        bar = progress.add_task(f"{recipe.name} {arm.name}", total=steps or recipe.steps, loss=float("nan"))

        def stepped(step: int, loss: SupportsFloat) -> None:
            if step % 10 == 0 or step == (steps or recipe.steps):
                progress.update(bar, completed=step, loss=float(loss))

        lab_run(recipe, arm, seed=seed, trace=trace, steps=steps, url=url, on_step=stepped)
    console.print(f"trace: {trace}")


def score(traces: Sequence[Path], console: Console, *, report: Path | None) -> None:
    """Score recorded runs and print a line for each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trace", overflow="fold", min_width=16)
    for name in ("steps", "warned", "layer", "head", "signal", "cause", "forecast", "at 512"):
        table.add_column(name, justify="right")
    for each in lab_score(traces, report=report):
        cells = (
            each.steps,
            each.first_warning_step,
            each.layer,
            each.head,
            each.signal,
            each.cause,
            None if each.forecast_steps is None else round(each.forecast_steps),
            each.dangerous_step,
        )
        table.add_row(
            Path(each.file).name.removesuffix(".gz").removesuffix(".jsonl"),
            *("-" if cell is None else str(cell) for cell in cells),
        )
    console.print(table)
    console.print(
        "warned: step of the first warning. forecast: steps from then until the head's largest |score| is 512."
    )
    console.print("at 512: step at which it was.")
    if report is not None:
        console.print(f"report: {report}")
