"""`foreshock lab`: the failure laboratory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic_core import to_json
from rich.console import Console

from foreshock.cli.errors import Commands
from foreshock.cli.output import console, print_whole, table_of

lab = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="The failure laboratory, in a checkout only: train small models until they fail, and score the detectors.",
)


@lab.command("run")
def lab_run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe of lab/training/recipes.toml, which describes them.")],
    variant: Annotated[
        str, typer.Option(help="The variant: untreated (the baseline), rescued, control, paper or exact-delta.")
    ] = "untreated",
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Number of steps; by default the recipe's own.", min=1)] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the trace, and a checkpoint every 500 steps and at the end; by default one named "
            "after recipe, variant and seed."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's newest checkpoint.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Minutes after which the run ends with a checkpoint, as by SIGTERM."),
    ] = None,
) -> None:
    """Train one variant of a recipe and record every head of every sample.

    Under torchrun the processes split each batch, whose size stays that of the recipe:
    torchrun --nproc-per-node 8 -m foreshock lab run ...
    """
    from foreshock.lab.training.long_run import LongRun
    from foreshock.lab.training.ranks import launched
    from foreshock.lab.training.recipes import find_recipe
    from foreshock.lab.training.variant import find_variant

    made, chosen, out = find_recipe(recipe), find_variant(variant), console()

    def say(sentence: str) -> None:
        out.print(sentence, soft_wrap=True, highlight=False)

    with launched() as ranks:
        long = LongRun(
            recipe=made,
            variant=chosen,
            seed=seed,
            folder=folder or Path(f"{made.name}_{chosen.name}_seed{seed}"),
            steps=steps,
            resume=resume,
            minutes=minutes,
            ranks=ranks,
            say=say,
        )
        came_to = long.train()
    if ranks.rank == 0:
        say(f"trace: {long.trace}; `foreshock lab score` and `foreshock replay` read it")
    if ranks.rank == 0 and came_to < long.last:
        say(f"ended at step {came_to} of {long.last}; continue with the same command and --resume")


@lab.command("corpus")
def lab_corpus(
    text: Annotated[
        str,
        typer.Argument(
            help="byte-pairs (source of installed packages) or folders (source files in the given folders)."
        ),
    ],
    folder: Annotated[
        list[Path] | None, typer.Option(help="With `folders`: folder with source files; may be repeated.")
    ] = None,
    characters: Annotated[int, typer.Option(help="Most characters of source to use.", min=1)] = 1_000_000_000,
) -> None:
    """Tokenize a dataset for runs on this machine, and show its size, hash and file.

    `folders` without --folder shows the existing dataset.
    """
    from foreshock.lab import texts

    if text not in texts.VOCABULARIES:
        raise ValueError(f"text {text!r} does not exist; allowed are {', '.join(texts.VOCABULARIES)}")
    if folder and text != "folders":
        raise ValueError(f"--folder is for the text of folders: foreshock lab corpus folders, not {text}")
    folders = folder or (texts.installed() if text == "byte-pairs" else None)
    corpus = texts.make_text(text, folders, characters) if folders else texts.read_text(text)
    line = f"{corpus.source}: {len(corpus.tokens):,} tokens, SHA-256 {corpus.sha256}\nIt is at {texts.text_file(text)}"
    console().print(line, soft_wrap=True, highlight=False)


@lab.command("score")
def lab_score(
    traces: Annotated[list[Path] | None, typer.Argument(help="Recorded runs.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Score synthetic runs of many kinds instead; takes some minutes.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write the scores as JSON.")] = None,
) -> None:
    """Score detectors and baselines on recorded runs: which warned, when, with which cause, and how often falsely.

    To measure loss degradation, also pass the float32 control of each run (same recipe and seed, variant "control").
    """
    if synthetic == bool(traces):
        raise typer.BadParameter("give recorded runs, or --synthetic")
    if traces:
        print_scores(traces, console(), report=report)
    else:
        _print_synthetic(console(), report=report)


_OF_A_RUN: Final = (
    *("trace", "truth", "steps", "first_warning_step", "layer", "head", "signal", "cause", "forecast_steps"),
    *("dangerous_step", "harm_step"),
)
"""Columns of the table of runs; docs/scoring.md explains those of all tables."""


def print_scores(traces: Sequence[Path], out: Console, *, report: Path | None) -> None:
    """Score recorded runs, and print tables of runs, monitors, healthy runs, causes and forecasts."""
    from foreshock.lab.scoring.score import lab_score

    scores, result = lab_score(traces, report=report)
    _show(out, "Runs", [{name: getattr(each, name) for name in _OF_A_RUN} for each in scores])
    _show(out, "Monitors", result["table"])
    _show(out, "Healthy runs", result["healthy"])
    _show(out, "Observed runs that were first warned about as rounding", [result["precision"]])
    _show(out, "Heads that a first warning forecast, and that came to 512", [result["forecasts"]])
    if report is not None:
        out.print(f"report: {report}")


def _print_synthetic(out: Console, *, report: Path | None) -> None:
    from foreshock.lab.scoring.synthetic import score_synthetic

    rows = list(score_synthetic())
    _show(out, "Made-up runs, of which nothing was trained", list(map(asdict, rows)))
    if report is not None:
        report.write_bytes(to_json(rows, indent=1) + b"\n")
        out.print(f"report: {report}")


def _show(out: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    out.print(f"[bold]{title}[/bold]")
    print_whole(table_of(rows), out)
    out.print()
