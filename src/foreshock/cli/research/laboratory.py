"""`foreshock lab ...` as text on the terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import SupportsFloat

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from foreshock.cli.output import print_json, print_whole
from foreshock.cli.research.scores import COLUMNS, cell
from foreshock.lab.training.arm import ARMS, UNTREATED, Arm, find_arm, variant
from foreshock.lab.training.recipes import RECIPES, Recipe, find_recipe


def recipes_as_json() -> None:
    """Every recipe and arm as JSON."""
    recipes = [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "layers": recipe.model.layers,
            "heads": recipe.model.heads,
            "width": recipe.model.width,
            "context": recipe.model.context,
            "batch": recipe.batch,
            "learning_rate": recipe.learning_rate,
            "steps": recipe.steps,
        }
        for recipe in RECIPES.values()
    ]
    print_json({"recipes": recipes, "arms": list(ARMS)})


def list_recipes(console: Console) -> None:
    """Every recipe and arm, in words and numbers."""
    for recipe in RECIPES.values():
        shape = recipe.model
        console.print(f"[bold]{recipe.name}[/bold]  {recipe.summary}")
        console.print(
            f"  {shape.layers} layers, {shape.heads} heads, width {shape.width}, context {shape.context}, batch "
            f"{recipe.batch}, learning rate {recipe.learning_rate:g}, {recipe.steps} steps\n"
        )
    console.print(f"variants (--arm): {', '.join(ARMS)}; {UNTREATED.name} is the baseline")


def show_corpus(name: str, console: Console, *, folders: Sequence[Path], characters: int) -> None:
    """What runs on this machine are trained on: the bytes at hand, or byte pairs, which are made; of folders where some
    are given, else those that were made are shown.

    Raises ValueError for an unknown text, and for folders of another than theirs.
    """
    from foreshock.lab.texts.byte_pairs import MADE_FROM, SHA256, byte_pairs_file, make_byte_pairs
    from foreshock.lab.texts.corpus import standard_library
    from foreshock.lab.texts.folder_text import folder_text, folder_text_file, make_folder_text

    if name not in ("bytes", "byte-pairs", "folders"):
        raise ValueError(f"text {name!r} does not exist; allowed are bytes, byte-pairs and folders")
    if name == "folders":
        corpus = make_folder_text(folders, characters) if folders else folder_text()
        held_out = 0 if corpus.held_out is None else len(corpus.held_out)
        summary = f"{corpus.source}: {len(corpus.tokens):,} tokens, {held_out:,} held out, SHA-256"
        console.print(f"{summary} {corpus.sha256}\nIt lies at {folder_text_file()}", soft_wrap=True, highlight=False)
        return
    if folders:
        raise ValueError(f"--folder is for the text of folders: foreshock lab corpus folders, not {name}")
    corpus = standard_library() if name == "bytes" else make_byte_pairs()
    console.print(f"{corpus.source}: {len(corpus.tokens):,} tokens, SHA-256 {corpus.sha256}", soft_wrap=True)
    if name == "byte-pairs":
        console.print(f"It lies at {byte_pairs_file()}", soft_wrap=True)
        if corpus.sha256 != SHA256:
            console.print(
                f"The published runs saw another text, SHA-256 {SHA256}, made from {MADE_FROM}", soft_wrap=True
            )


def run_set(
    name: str,
    console: Console,
    *,
    folder: Path,
    processes: int,
    runs_per_process: int,
    gpus: Sequence[int],
    minutes: float | None,
    only: Sequence[str] = (),
) -> None:
    """Make the traces of one published set that are not there yet.

    Raises ValueError for an unknown set, and for a pattern that no run of the set matches.
    """
    from foreshock.lab.sets.published_runs import published
    from foreshock.lab.sets.run_set import chosen
    from foreshock.lab.sets.run_set import run_set as make

    sets = published()
    if name not in sets:
        raise ValueError(f"set {name!r} does not exist; allowed are {', '.join(sets)}")
    missing = make(
        chosen(sets[name], only),
        folder,
        processes=processes,
        runs_per_process=runs_per_process,
        gpus=gpus,
        seconds=float("inf") if minutes is None else 60 * minutes,
        say=console.print,
    )
    for trace in missing:
        console.print(f"missing: {trace}")


def run_table(traces: Sequence[Path], console: Console, *, json: Path | None) -> None:
    """A row for each recorded run, and the same in a JSON file."""
    from foreshock.lab.scoring.run_table import run_rows

    runs = [asdict(run) for run in run_rows(traces)]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in runs[0]:
        shown.add_column(
            name.replace("_", " "), justify="left" if name in ("recipe", "arm", "backend", "cause") else "right"
        )
    for run in runs:
        shown.add_row(*map(cell, run.values()))
    print_whole(shown, console)
    console.print(
        "first warning, cause: of the agent, as it trained. head right: it named the head whose |score| was the first "
        "at 512, here or in the observed run of the seed. loss end: mean of the last 1000 steps."
    )
    if json is not None:
        json.write_text(dumps({"runs": runs}, indent=1) + "\n")
        console.print(f"JSON: {json}")


def matrix(
    failures: Sequence[str] | None,
    remedies: Sequence[str] | None,
    ons: Sequence[str] | None,
    seeds: str,
    console: Console,
    *,
    workers: int,
    minutes: float | None,
    json: Path | None,
    traces: Path | None,
) -> None:
    """Print a row for each failure, remedy and time of it: of all seeds how many exploded, what they ended at, and what
    the agent warned of.

    Raises ValueError for seeds that are no range, and for a failure, remedy or time that does not exist.
    """
    from foreshock.lab.sets import matrix as sets

    def print_run(run: sets.Run) -> None:
        how = f"{run.failure}, {run.remedy}{f' on {run.on}' if run.on else ''}, seed {run.seed}"
        console.print(f"{how}: {run.processor_seconds:.0f} s", highlight=False)

    cells = list(
        sets.cells(
            failures or tuple(sets.FAILURES),
            remedies or (*sets.REMEDIES, "float32"),
            ons or ("start", "warning"),
            _range(seeds),
        )
    )
    found = sets.matrix(cells, workers=workers, minutes=minutes, json_file=json, on_run=print_run, traces=traces)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("failure", "remedy", "on", "exploded", "loss", "largest score", "warned", "cause"):
        table.add_column(name, justify="left" if name in ("failure", "remedy", "on", "cause") else "right")
    for row in sets.rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"{len(found)} of {len(cells)} trainings. Loss, largest score and step of the first warning are medians.",
        highlight=False,
    )


def _range(seeds: str) -> range:
    """Of the first and the last, or of one. Raises ValueError."""
    first, dash, last = seeds.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise ValueError(f"seeds {seeds!r} are no range; give the first and the last, such as 1-3, or one")
    return range(int(first), int(last) + 1)


def run(
    recipe_name: str,
    console: Console,
    *,
    arm_name: str,
    seed: int,
    steps: int | None,
    trace: Path,
    checkpoint: Path | None,
    url: str | None,
) -> None:
    """Train one arm of a recipe, write its trace and say how it ended. Of several processes the first one speaks."""
    from foreshock.lab.training.ranks import launched
    from foreshock.lab.training.run import lab_run

    recipe, arm = find_recipe(recipe_name), find_arm(arm_name)
    with launched() as ranks, _bar(console, recipe, arm, steps, shown=ranks.rank == 0) as stepped:
        lab_run(
            recipe,
            arm,
            seed=seed,
            trace=trace,
            steps=steps,
            checkpoint=checkpoint,
            url=url,
            ranks=ranks,
            on_step=stepped,
        )
    if ranks.rank == 0:
        console.print(f"trace: {trace}; `foreshock lab score` and `foreshock replay` read it")


def long_run(
    recipe_name: str,
    console: Console,
    *,
    arm_name: str,
    seed: int,
    steps: int | None,
    url: str | None,
    folder: Path,
    resume: bool,
    minutes: float | None,
    branch_from: Path | None,
) -> None:
    """Train one arm of a recipe in a folder, and say at each checkpoint what it came to."""
    from foreshock.lab.training.long_run import LongRun
    from foreshock.lab.training.ranks import launched

    recipe, arm = find_recipe(recipe_name), find_arm(arm_name)

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, highlight=False)

    with launched() as ranks, _bar(console, recipe, arm, steps, shown=ranks.rank == 0) as stepped:
        run = LongRun(
            recipe=recipe,
            arm=arm,
            seed=seed,
            folder=folder,
            steps=steps,
            resume=resume,
            minutes=minutes,
            branch_from=branch_from,
            url=url,
            ranks=ranks,
            say=say,
            on_step=stepped,
        )
        came_to = run.train()
    if ranks.rank == 0 and came_to < run.last:
        say(f"ended at step {came_to} of {run.last}; the same command with --resume goes on")


@contextmanager
def _bar(
    console: Console, recipe: Recipe, arm: Arm, steps: int | None, *, shown: bool
) -> Iterator[Callable[[int, SupportsFloat], None]]:
    """A progress bar, by a function that takes each step and its loss."""
    last = steps or recipe.steps
    columns = (*COLUMNS, TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=console, disable=not shown) as progress:
        bar = progress.add_task(f"{recipe.name} {variant(arm.name)}", total=last, loss=float("nan"))

        def stepped(step: int, loss: SupportsFloat) -> None:
            if shown and (step % 10 == 0 or step == last):
                progress.update(bar, completed=step, loss=float(loss))

        yield stepped
