"""What `foreshock replay`, `foreshock lab run` and `foreshock lab score` do: the laboratory with words and bars."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foreshock.contract import wire
from foreshock.lab.recipes import find_arm, find_recipe
from foreshock.lab.replay import replay as play
from foreshock.lab.score import Score, lab_score
from foreshock.lab.service import local_service


def replay(
    trace: Path,
    *,
    url: str | None = None,
    token: str | None = None,
    port: int = 8765,
    run: str | None = None,
    steps_per_second: float | None = None,
    console: Console | None = None,
) -> None:
    """Play a recorded run through detectors, service and page, and tell its verdicts.

    url: a running service; without one a service of its own is started on `port` (0 takes a free one) for as long as
    the person looks. Raises ValueError for a file that is no trace and for a service that is not there.
    """
    console = console or Console()

    def tell(event: wire.Event) -> None:
        if isinstance(event, wire.Verdict):
            console.print(f"[bold]step {event.step:>6}[/bold]  {event.state:<8} {event.sentence}", highlight=False)

    with ExitStack() as stack:
        own = url is None
        if url is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-replay-"))
            url = stack.enter_context(local_service(Path(directory), port))
        name = play(trace, url=url, token=token, run=run, steps_per_second=steps_per_second, on_event=tell)
        console.print(f"\nThe run is on the page: {url}/?runs={name}", soft_wrap=True)
        if own and console.is_terminal and sys.stdin.isatty():
            console.input("The page stays up until you press Enter. ")


def run(
    recipe: str,
    *,
    arm: str = "untreated",
    seed: int = 1,
    steps: int | None = None,
    trace: Path | None = None,
    url: str | None = None,
    console: Console | None = None,
) -> Path:
    """Train one arm of a recipe with a progress bar; where its trace was written.

    Raises ValueError for a recipe or an arm that does not exist.
    """
    from foreshock.lab.run import lab_run

    console = console or Console()
    chosen, treated = find_recipe(recipe), find_arm(arm)
    path = trace or Path(f"{chosen.name}_{treated.name}_seed{seed}.jsonl.gz")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(treated.name, total=steps or chosen.steps)
        lab_run(
            chosen,
            treated,
            seed=seed,
            trace=path,
            steps=steps,
            url=url,
            on_step=lambda step, loss: progress.update(bar, completed=step, description=f"loss {loss:.3f}"),
        )
    console.print(f"Trace: {path}")
    return path


def score(traces: Sequence[Path], *, report: Path | None = None, console: Console | None = None) -> list[Score]:
    """Score recorded runs and print one line for each. Raises ValueError for a file that is no trace."""
    console = console or Console()
    scores = lab_score(traces, report=report)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("trace", "steps", "first warning", "head", "cause", "forecast", "reached 512"):
        table.add_column(column)
    for each in scores:
        table.add_row(
            each.file,
            str(each.steps),
            "quiet" if each.first_warning_step is None else str(each.first_warning_step),
            "" if each.layer is None else f"layer {each.layer} head {each.head}",
            each.cause or "",
            "" if each.forecast_steps is None else f"in {each.forecast_steps:.0f} steps",
            "" if each.dangerous_step is None else str(each.dangerous_step),
        )
    console.print(table)
    return scores
