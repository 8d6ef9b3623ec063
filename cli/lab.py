"""`foreshock lab`: the failure laboratory."""

from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.errors import Commands
from foreshock.cli.options import AsJson

lab = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="The failure laboratory: train small models until they fail, and score the detectors.",
)


@lab.command("recipes")
def lab_recipes(as_json: AsJson = False) -> None:
    """List the recipes and their variants."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    if as_json:
        laboratory.recipes_as_json()
    else:
        laboratory.list_recipes(console())


@lab.command("run")
def lab_run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe; `foreshock lab recipes` lists them.")],
    arm: Annotated[
        str, typer.Option(help="The variant: untreated (the baseline), rescued, control, paper or exact-delta.")
    ] = "untreated",
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Number of steps; by default the recipe's own.", min=1)] = None,
    trace: Annotated[Path, typer.Option(help="File to write the recording to.")] = Path("trace.jsonl.gz"),
    checkpoint: Annotated[
        Path | None, typer.Option(help="File to write a checkpoint of the last step to, for `foreshock diagnose`.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Also send it to this service.")] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="By GPT2LMHeadModel and Trainer of transformers, with the callback.")
    ] = False,
) -> None:
    """Train one variant of a recipe and record every head of every sample."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    if transformers:
        if checkpoint is not None or url is not None:
            raise ValueError("--transformers keeps no checkpoint and sends nothing; leave out --checkpoint and --url")
        laboratory.run_through_transformers(recipe, console(), arm_name=arm, seed=seed, steps=steps, trace=trace)
        return
    laboratory.run(recipe, console(), arm_name=arm, seed=seed, steps=steps, trace=trace, checkpoint=checkpoint, url=url)


@lab.command("run-set")
def lab_run_set(
    name: Annotated[
        str,
        typer.Argument(
            help="Which set: cpu, healthy, gpu, other, removal, rescue, cure-explosion, cure-twenty, cure-text, "
            "cure-deep, cure-small, real-text, real-text-large or real-text-small."
        ),
    ],
    folder: Annotated[
        Path, typer.Option(help="Folder for the traces; runs that are there already are not made again.")
    ],
    processes: Annotated[int, typer.Option(help="Number of processes side by side.", min=1)] = 1,
    runs_per_process: Annotated[
        int, typer.Option(help="Trainings that each process runs at once, for a GPU.", min=1)
    ] = 1,
    gpu: Annotated[list[int] | None, typer.Option(help="GPU to use; may be repeated to spread the runs.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after so many minutes; runs that are cut short go to the folder `unfinished`."),
    ] = None,
    rivals: Annotated[bool, typer.Option(help="Also measure what other monitors read; slow on a GPU.")] = True,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Make only runs whose name matches, such as 'text-gpt_*' or '*_seed1'; may be repeated."),
    ] = None,
) -> None:
    """Make the published set of runs again: every recipe, variant and seed of it."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    laboratory.run_set(
        name,
        console(),
        folder=folder,
        processes=processes,
        runs_per_process=runs_per_process,
        gpus=gpu or (),
        minutes=minutes,
        rivals=rivals,
        only=only or (),
    )


@lab.command("compare")
def lab_compare(
    traces: Annotated[list[Path], typer.Argument(help="Traces of several variants, with their float32 controls.")],
    picture: Annotated[Path | None, typer.Option(help="PNG file to draw the curves of one recipe and seed to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs with their float32 control: loss, quality loss, largest score, offset and first warning."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    laboratory.compare(traces, console(), picture=picture, as_json=as_json)


@lab.command("cure")
def lab_cure(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces of several variants and seeds, with their float32 controls.")
    ],
    json: Annotated[Path | None, typer.Option(help="File to write every number to.")] = None,
) -> None:
    """Compare what each mode did after a switch: loss above the control, quality loss, offset and largest score."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    laboratory.cure(traces, console(), json=json)


@lab.command("demo-seeds")
def lab_demo_seeds(
    seeds: Annotated[str, typer.Option(help="First and last seed, such as 101-120; or one.")],
    recipe: Annotated[str, typer.Option(help="key-bias-small, fast-biases or shared-values.")] = "key-bias-small",
    processor: Annotated[
        list[str] | None,
        typer.Option(help="own, or plain: without vector instructions. Give it several times; by default both."),
    ] = None,
    processes: Annotated[int, typer.Option(help="Seeds side by side, one thread each.", min=1)] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Where every seed is kept; those that are there are not trained again.")
    ] = None,
) -> None:
    """Train what the demo trains on many seeds and two kinds of processor, and say on how many its promise holds."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    laboratory.demo_seeds(seeds, console(), recipe=recipe, processors=processor, processes=processes, json=json)


@lab.command("changes")
def lab_changes(
    change: Annotated[
        list[str] | None,
        typer.Argument(help="none, text, reversed, rate, warm-up, context, batch, thaw or agent; by default all."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="First and last seed, such as 1-3; or one.")] = "1",
    processes: Annotated[int, typer.Option(help="Trainings side by side, one thread each.", min=1)] = 1,
    json: Annotated[Path | None, typer.Option(help="File to write every number and warning to.")] = None,
) -> None:
    """Train a small healthy model that is changed half-way, and say whether a head was warned about."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    laboratory.changes(change or (), seeds, console(), processes=processes, json=json)


@lab.command("corpus")
def lab_corpus(
    text: Annotated[
        str,
        typer.Argument(help="bytes, or byte-pairs. Byte pairs are made from installed packages and kept in a file."),
    ] = "bytes",
) -> None:
    """Show the text that runs on this machine are trained on, and its hash."""
    from foreshock.cli import laboratory
    from foreshock.cli.output import console

    laboratory.show_corpus(text, console())


@lab.command("score")
def lab_score(
    traces: Annotated[list[Path], typer.Argument(help="Recorded runs, of this laboratory or of another source.")],
    report: Annotated[Path | None, typer.Option(help="Write the scores as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw lead against false alarms as a PNG, one line for each monitor.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Score held-out runs on real text too, once: this file keeps by which detectors."),
    ] = None,
) -> None:
    """Score detectors and baselines on recorded runs: who was warned about, when, why, and how good the forecast was.

    Give the float32 control of a run beside it (same recipe and seed, variant "control"): it measures quality loss.
    """
    from foreshock.cli import scores
    from foreshock.cli.output import console

    scores.score(traces, console(), report=report, picture=picture, seal=held_out)


@lab.command("ablation")
def lab_ablation(
    traces: Annotated[list[Path], typer.Argument(help="Recorded runs; only those for tuning are looked at.")],
    report: Annotated[Path | None, typer.Option(help="Write every number as JSON.")] = None,
) -> None:
    """Say what every condition of the detectors gives and costs: the tuning runs scored without each of them."""
    from foreshock.cli import scores
    from foreshock.cli.output import console

    scores.ablation(traces, console(), report=report)


@lab.command("forecasts")
def lab_forecasts(
    traces: Annotated[list[Path], typer.Argument(help="Recorded runs; only those for tuning are looked at.")],
    report: Annotated[Path | None, typer.Option(help="Write every number as JSON.")] = None,
) -> None:
    """Say how long warned heads took to a score of 512, beside their course, and how often the range held: each recipe
    by the range that all others give."""
    from foreshock.cli import scores
    from foreshock.cli.output import console

    scores.forecasts(traces, console(), report=report)


@lab.command("thinning")
def lab_thinning(
    traces: Annotated[list[Path], typer.Argument(help="Recorded runs, none of them held out.")],
    every: Annotated[
        list[int] | None, typer.Option(min=2, help="k to try; again for more. By default 2 to 32.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of thinnings of every run.")] = 3,
    report: Annotated[Path | None, typer.Option(help="Write every number as JSON.")] = None,
) -> None:
    """Say what the detectors lose where one in k blocks of rows is looked at: runs, thinned and judged anew."""
    from foreshock.cli import scores
    from foreshock.cli.output import console
    from foreshock.lab.scoring.thinned import EVERY

    scores.thinning(traces, every or EVERY, console(), seeds=seeds, report=report)


@lab.command("claims")
def lab_claims(
    runs: Annotated[list[Path], typer.Argument(help="Traces (.gz) and checkpoints of `foreshock lab run`.")],
    batches: Annotated[int, typer.Option(help="Number of batches that each checkpoint is run on.", min=2)] = 16,
    report: Annotated[Path | None, typer.Option(help="Write every number as JSON.")] = None,
) -> None:
    """Test the claims of the paper on runs of several variants and seeds. Prints a Markdown table."""
    from foreshock.lab.diagnosis.claims import lab_claims as evaluate

    typer.echo(evaluate(runs, batches=batches, report=report))
