"""`foreshock lab ...` as text on the terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsFloat

from rich.console import Console
from rich.progress import Progress, TextColumn

from foreshock.cli.research.scores import COLUMNS
from foreshock.lab.training.recipes import RECIPES, Recipe, find_recipe
from foreshock.lab.training.variant import UNTREATED, VARIANTS, Variant, find_variant, shown_name


def list_recipes(console: Console) -> None:
    """Every recipe and variant, in words and numbers."""
    for recipe in RECIPES.values():
        shape = recipe.model
        console.print(f"[bold]{recipe.name}[/bold]  {recipe.summary}")
        console.print(
            f"  {shape.layers} layers, {shape.heads} heads, width {shape.width}, context {shape.context}, batch "
            f"{recipe.batch}, learning rate {recipe.learning_rate:g}, {recipe.steps} steps\n"
        )
    console.print(f"variants (--variant): {', '.join(VARIANTS)}; {UNTREATED.name} is the baseline")


def show_corpus(name: str, console: Console, *, folders: Sequence[Path], characters: int) -> None:
    """What runs on this machine are trained on: the bytes at hand, or byte pairs, which are made; of folders where some
    are given, else those that were made are shown.

    Raises ValueError for an unknown text, and for folders of another than theirs.
    """
    from foreshock.lab import texts

    if name not in ("bytes", "byte-pairs", "folders"):
        raise ValueError(f"text {name!r} does not exist; allowed are bytes, byte-pairs and folders")
    if name == "folders":
        corpus = texts.make_folder_text(folders, characters) if folders else texts.folder_text()
        held_out = 0 if corpus.held_out is None else len(corpus.held_out)
        summary = f"{corpus.source}: {len(corpus.tokens):,} tokens, {held_out:,} held out, SHA-256"
        console.print(
            f"{summary} {corpus.sha256}\nIt is at {texts.folder_text_file()}", soft_wrap=True, highlight=False
        )
        return
    if folders:
        raise ValueError(f"--folder is for the text of folders: foreshock lab corpus folders, not {name}")
    corpus = texts.standard_library() if name == "bytes" else texts.make_byte_pairs()
    console.print(f"{corpus.source}: {len(corpus.tokens):,} tokens, SHA-256 {corpus.sha256}", soft_wrap=True)
    if name == "byte-pairs":
        console.print(f"It is at {texts.byte_pairs_file()}", soft_wrap=True)
        if corpus.sha256 != texts.SHA256:
            console.print(
                f"The published runs saw another text, SHA-256 {texts.SHA256}, made from {texts.MADE_FROM}",
                soft_wrap=True,
            )


def run(
    recipe_name: str,
    console: Console,
    *,
    variant_name: str,
    seed: int,
    steps: int | None,
    url: str | None,
    folder: Path | None,
    resume: bool,
    minutes: float | None,
    branch_from: Path | None,
) -> None:
    """Train one variant of a recipe in a folder, and print its state at each checkpoint, on the first process only."""
    from foreshock.lab.training.long_run import LongRun
    from foreshock.lab.training.ranks import launched

    recipe, variant = find_recipe(recipe_name), find_variant(variant_name)

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, highlight=False)

    with launched() as ranks, _bar(console, recipe, variant, steps, shown=ranks.rank == 0) as stepped:
        long = LongRun(
            recipe=recipe,
            variant=variant,
            seed=seed,
            folder=folder or Path(f"{recipe.name}_{variant.name}_seed{seed}"),
            steps=steps,
            resume=resume,
            minutes=minutes,
            branch_from=branch_from,
            url=url,
            ranks=ranks,
            say=say,
            on_step=stepped,
        )
        came_to = long.train()
    if ranks.rank == 0:
        say(f"trace: {long.trace}; `foreshock lab score` and `foreshock replay` read it")
    if ranks.rank == 0 and came_to < long.last:
        say(f"ended at step {came_to} of {long.last}; continue with the same command and --resume")


@contextmanager
def _bar(
    console: Console, recipe: Recipe, variant: Variant, steps: int | None, *, shown: bool
) -> Iterator[Callable[[int, SupportsFloat], None]]:
    """A progress bar, by a function that takes each step and its loss."""
    last = steps or recipe.steps
    columns = (*COLUMNS, TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=console, disable=not shown) as progress:
        bar = progress.add_task(f"{recipe.name} {shown_name(variant.name)}", total=last, loss=float("nan"))

        def stepped(step: int, loss: SupportsFloat) -> None:
            if shown and (step % 10 == 0 or step == last):
                progress.update(bar, completed=step, loss=float(loss))

        yield stepped
