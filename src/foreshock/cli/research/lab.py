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
    from foreshock.cli.output import console
    from foreshock.cli.research import laboratory

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
    trace: Annotated[Path, typer.Option(help="File to write the recording to; with --folder it lies there.")] = Path(
        "trace.jsonl.gz"
    ),
    checkpoint: Annotated[
        Path | None, typer.Option(help="File to write a checkpoint of the last step to, for `foreshock diagnose`.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Also send it to this service.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for a long run: trace, losses, and a checkpoint every 500 steps and at the end."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of --folder.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Minutes after which the run ends with a checkpoint in --folder, as by SIGTERM."),
    ] = None,
    branch_from: Annotated[
        Path | None, typer.Option(help="Start in --folder from this checkpoint, which may be another variant's.")
    ] = None,
) -> None:
    """Train one variant of a recipe and record every head of every sample.

    Under torchrun the processes share out each batch, which stays the recipe's:
    torchrun --nproc-per-node 8 -m foreshock lab run ...
    """
    from foreshock.cli.output import console
    from foreshock.cli.research import laboratory

    if folder is not None:
        laboratory.long_run(
            recipe,
            console(),
            arm_name=arm,
            seed=seed,
            steps=steps,
            url=url,
            folder=folder,
            resume=resume,
            minutes=minutes,
            branch_from=branch_from,
        )
        return
    if resume or minutes is not None or branch_from is not None:
        raise ValueError("--resume, --minutes and --branch-from need --folder, where the checkpoints lie")
    laboratory.run(recipe, console(), arm_name=arm, seed=seed, steps=steps, trace=trace, checkpoint=checkpoint, url=url)


@lab.command("run-set")
def lab_run_set(
    name: Annotated[
        str,
        typer.Argument(
            help="Which set: real-text, real-text-large, real-text-small, vendor, vendor-healthy, qk-clip or demo."
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
        typer.Option(help="Minutes after which it stops; runs that are cut short go to the folder `unfinished`."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Make only runs whose name matches, such as 'text-gpt_*' or '*_seed1'; may be repeated."),
    ] = None,
) -> None:
    """Make the published set of runs again: every recipe, variant and seed of it."""
    from foreshock.cli.output import console
    from foreshock.cli.research import laboratory

    laboratory.run_set(
        name,
        console(),
        folder=folder,
        processes=processes,
        runs_per_process=runs_per_process,
        gpus=gpu or (),
        minutes=minutes,
        only=only or (),
    )


@lab.command("run-table")
def lab_run_table(
    traces: Annotated[list[Path], typer.Argument(help="Recorded runs.")],
    json: Annotated[Path | None, typer.Option(help="File to write every number to.")] = None,
) -> None:
    """List recorded runs: first warning, cause, a score of 512, switch, and loss, score and offset at the end."""
    from foreshock.cli.output import console
    from foreshock.cli.research import laboratory

    laboratory.run_table(traces, console(), json=json)


@lab.command("matrix")
def lab_matrix(
    failure: Annotated[
        list[str] | None,
        typer.Argument(help="Failures to make, such as 'rounding' or 'score growth by AdamW'; by default all."),
    ] = None,
    remedy: Annotated[
        list[str] | None,
        typer.Option(
            help="nothing, row_corrected, qk_clip, both, or float32 for a control; may be repeated, by default all."
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(help="When the remedy comes: start or warning; may be repeated, by default both."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="First and last seed, such as 1-3; or one.")] = "1",
    workers: Annotated[int, typer.Option(help="Trainings side by side, one thread each.", min=1)] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes after which no training begins; called again, it goes on.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Where every training is kept; those that are there are not made again.")
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder to record every training in that is made.")] = None,
) -> None:
    """Train a small GPT into each failure, with each remedy, and say what held it and what the agent warned about."""
    from foreshock.cli.output import console
    from foreshock.cli.research import laboratory

    laboratory.matrix(failure, remedy, on, seeds, console(), workers=workers, minutes=minutes, json=json, traces=traces)


@lab.command("corpus")
def lab_corpus(
    text: Annotated[
        str,
        typer.Argument(
            help="bytes, byte-pairs or folders. Byte pairs are made from installed packages, or from the source files "
            "of folders, and kept in a file."
        ),
    ] = "bytes",
    folder: Annotated[
        list[Path] | None, typer.Option(help="Folder to make the text of folders from; may be repeated.")
    ] = None,
    characters: Annotated[int, typer.Option(help="Of its text, at most.", min=1)] = 1_000_000_000,
) -> None:
    """Show the text that runs on this machine are trained on, and its hash."""
    from foreshock.cli.output import console
    from foreshock.cli.research import laboratory

    laboratory.show_corpus(text, console(), folders=folder or (), characters=characters)


@lab.command("score")
def lab_score(
    traces: Annotated[list[Path] | None, typer.Argument(help="Recorded runs.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Score made-up runs of many kinds instead; takes some minutes.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write the scores as JSON.")] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Score held-out runs on real text too, once: this file keeps by which detectors."),
    ] = None,
) -> None:
    """Score detectors and baselines on recorded runs: who was warned about, when, why, and how good the forecast was.

    Give the float32 control of a run beside it (same recipe and seed, variant "control"): it measures quality loss.
    """
    from foreshock.cli.output import console
    from foreshock.cli.research import scores

    if synthetic == bool(traces):
        raise typer.BadParameter("give recorded runs, or --synthetic")
    if synthetic:
        scores.score_synthetic(console(), report=report)
    else:
        scores.score(traces or [], console(), report=report, seal=held_out)
