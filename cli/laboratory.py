"""`foreshock replay`, `foreshock lab ...` and `foreshock bench ...` as text on the terminal."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import SupportsFloat

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from foreshock.cli.output import print_json, print_json_line
from foreshock.cli.scores import COLUMNS, cell
from foreshock.contract import wire
from foreshock.lab.recording.replay import replay
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.service import local_service
from foreshock.lab.training.arm import ARMS, UNTREATED, find_arm, variant
from foreshock.lab.training.recipes import RECIPES, find_recipe


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
    as_json: bool = False,
) -> None:
    """Replay a trace into `url`, into a service of its own, or (offline) onto the terminal alone.

    Raises ValueError for a file that is no trace, before anything is started. As JSON every event is a line, and the
    last one says what was played.
    """
    if not trace.is_file():
        raise ValueError(f"there is no trace at {trace}; the recorded runs are part of the repository, in lab/traces")
    played = read_trace(trace)
    with ExitStack() as stack:
        own = url is None and not offline
        if own:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-replay-"))
            url = stack.enter_context(local_service(Path(directory), port))
        if url is not None and not as_json:
            console.print(f"Live page: {url}/", soft_wrap=True)

        def tell(event: wire.Event) -> None:
            if as_json:
                if isinstance(event, wire.Verdict | wire.Switched):
                    print_json_line(event.model_dump(mode="json"))
            elif isinstance(event, wire.Verdict) and event.state != "updated":
                console.print(f"[bold]step {event.step:>6}[/bold]  {event.state}: {event.sentence}", highlight=False)
            elif isinstance(event, wire.Switched):
                heads = ", ".join(f"layer {layer} head {head}" for layer, head in event.heads)
                text = f"{heads}: {event.outcome}, {', '.join(sorted(set(event.after)))}"
                console.print(f"[bold]step {event.step:>6}[/bold]  {text}", highlight=False)

        name = replay(trace, played, url=url, token=token, run=run, steps_per_second=steps_per_second, on_event=tell)
        if as_json:
            print_json_line({"kind": "played", "trace": trace.name, "run": name if url else None, "url": url})
        else:
            console.print(f"{trace.name} was played" + (f" as run {name}." if url else "."))
        if own and not as_json and console.is_terminal and sys.stdin.isatty():
            console.input("The live page stays up until you press Enter. ")


def recipes_as_json() -> None:
    """Every recipe and arm as JSON."""
    told = [
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
    print_json({"recipes": told, "arms": list(ARMS)})


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


def show_corpus(name: str, console: Console) -> None:
    """What runs on this machine are trained on: the bytes at hand, or byte pairs, which are made where there are none.

    Raises ValueError for an unknown text.
    """
    from foreshock.lab.training.byte_pairs import MADE_FROM, SHA256, byte_pairs_file, make_byte_pairs
    from foreshock.lab.training.corpus import standard_library

    if name not in ("bytes", "byte-pairs"):
        raise ValueError(f"text {name!r} does not exist; allowed are bytes and byte-pairs")
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
    rivals: bool,
    only: Sequence[str] = (),
) -> None:
    """Make the traces of one published set that are not there yet.

    Raises ValueError for an unknown set, and for a pattern that no run of the set matches.
    """
    from foreshock.lab.training.published_runs import published
    from foreshock.lab.training.run_set import chosen
    from foreshock.lab.training.run_set import run_set as make

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
        rivals=rivals,
        say=console.print,
    )
    for trace in missing:
        console.print(f"missing: {trace}")


def compare(traces: Sequence[Path], console: Console, *, picture: Path | None, as_json: bool = False) -> None:
    """How the arms of a recipe ended beside their control, and a picture of their courses."""
    from foreshock.lab.scoring.courses import courses, draw_courses

    ended = courses(traces)
    if picture is not None:
        draw_courses(picture, traces)
    if as_json:
        warned = ({"first_warning": w and w.model_dump(mode="json")} for w in (each.first_warning for each in ended))
        print_json({"runs": [asdict(each) | warning for each, warning in zip(ended, warned, strict=True)]})
        return
    for recipe in dict.fromkeys(each.recipe for each in ended):
        table = Table(box=None, pad_edge=False, header_style="bold", title=recipe, title_justify="left")
        table.add_column("seed", no_wrap=True)
        table.add_column("variant", overflow="fold", min_width=11)
        for name in ("steps", "loss", "excess", "quality loss", "score", "offset", "warned"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("head, cause", overflow="fold")
        for each in (each for each in ended if each.recipe == recipe):
            warning = each.first_warning
            table.add_row(
                *(str(each.seed), variant(each.arm), str(each.steps), f"{each.loss:.3f}"),
                "-" if each.excess is None else f"{each.excess:+.1%}",
                *map(cell, (each.harm_step, round(each.largest_score, 1), round(each.offset, 1))),
                *(
                    cell(warning and warning.step),
                    f"{warning.layer}/{warning.head} {warning.cause}" if warning else "",
                ),
            )
        console.print(table)
    console.print("loss: mean of the last 1000 steps. excess: over the control's. score, offset: largest of any head.")
    if picture is not None:
        console.print(f"picture: {picture}")


def cure(traces: Sequence[Path], console: Console, *, json: Path | None) -> None:
    """What cures did to runs: a row for each recipe and arm, and every run in a JSON file."""
    from foreshock.lab.scoring.cure import as_json, cured_runs, table

    runs = cured_runs(traces)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("recipe", "variant", "when"):
        shown.add_column(name, overflow="fold", min_width=9)
    for name in (
        "policy",
        "runs",
        "failed",
        "chance",
        "quality loss",
        "score 512",
        "excess",
        "worst",
        "offset",
        "score",
        "common",
        "|b_K|",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table(runs):
        shown.add_row(
            *(row.recipe, variant(row.arm), row.when, row.policy, str(row.runs), str(row.failed)),
            *("-" if row.chance is None else f"{row.chance:.2g}", str(row.harmed), str(row.dangerous)),
            *("-" if share is None else f"{share:+.1%}" for share in (row.excess, row.worst_excess)),
            *(f"{number:.3g}" for number in (row.worst_offset, row.worst_score)),
            *("-" if number is None else f"{number:.2g}" for number in (row.common_share, row.key_bias)),
        )
    console.print(shown)
    console.print(
        "failed: quality loss, or a |score| of 512 after the switch. chance: that so few fail if it does nothing "
        "(Fisher's exact test against the baseline's runs). excess: loss of the last 1000 steps over the control's, "
        "median and worst run. offset: at the end, worst run. score: largest after the switch; score 512: runs that "
        "reached it. common: share of the largest offset that all keys give alike, median. |b_K|: "
        "largest key bias of a head."
    )
    if json is not None:
        json.write_text(dumps(as_json(runs), indent=1) + "\n")
        console.print(f"JSON: {json}")


def changes(names: Sequence[str], seeds: str, console: Console, *, processes: int, json: Path | None) -> None:
    """A row for each change of a training and seed: whether a head was warned about, and what the loss did.

    Raises ValueError for seeds that are no range, and for a change that does not exist.
    """
    from foreshock.lab.changes import CHANGED_AFTER, CHANGES, Seen
    from foreshock.lab.changes import changes as measure

    def told(seen: Seen) -> None:
        said = "quiet" if not seen.warnings else f"{len(seen.warnings)} heads from step {seen.first_step} on"
        console.print(f"{seen.change}, seed {seen.seed}: {said}, {seen.processor_seconds:.0f} s", highlight=False)

    found = measure(names or tuple(CHANGES), _range(seeds), processes=processes, json_file=json, on_seen=told)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("seed", "warned about", "first at step", "loss before", "after", "at the end", "change"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for each in found:
        losses = (f"{loss:.2f}" for loss in (each.loss_before, each.loss_after, each.loss_end))
        heads = len(each.warnings)
        table.add_row(str(each.seed), str(heads), cell(each.first_step), *losses, CHANGES[each.change])
    console.print(table)
    console.print(f"Changed after step {CHANGED_AFTER}; losses are means of 100 steps.", highlight=False)
    for sentence in [sentence for each in found for sentence in each.warnings]:
        console.print(sentence, highlight=False, soft_wrap=True)


def _range(seeds: str) -> range:
    """Of the first and the last, or of one. Raises ValueError."""
    first, dash, last = seeds.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise ValueError(f"seeds {seeds!r} are no range; give the first and the last, such as 101-120, or one")
    return range(int(first), int(last) + 1)


def demo_seeds(
    seeds: str, console: Console, *, recipe: str, processors: Sequence[str] | None, processes: int, json: Path | None
) -> None:
    """A row for each seed and kind of processor, and on how many the demo keeps its promise.

    Raises ValueError for seeds that are no range, and for a recipe that the demo does not know.
    """
    from foreshock.lab.demo_seeds import PROCESSORS, Shown
    from foreshock.lab.demo_seeds import demo_seeds as measure
    from foreshock.lab.demo_show import SHOWS

    chosen = _range(seeds)
    if recipe not in SHOWS:
        raise ValueError(f"the demo has no recipe {recipe!r}; allowed are {', '.join(SHOWS)}")

    def told(shown: Shown) -> None:
        kept = "kept" if shown.kept else "NOT KEPT"
        console.print(f"seed {shown.seed}, processor {shown.processor}: {kept}, {shown.processor_seconds:.0f} s")

    found = measure(
        SHOWS[recipe],
        chosen,
        processors=processors or tuple(PROCESSORS),
        processes=processes,
        json_file=json,
        on_shown=told,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("seed", "processor", "warned", "head", "switched", "offset", "score", "loss", "control", "seconds"):
        table.add_column(name, justify="right", no_wrap=name not in ("offset", "score", "loss"))
    for each in found:
        table.add_row(
            *(str(each.seed), each.processor, cell(each.warned_step), f"{each.layer}/{each.head} {each.cause or ''}"),
            cell(each.switched_step),
            *(
                ", ".join("-" if number is None else format(number, form) for number in numbers)
                for form, numbers in (
                    ("+.1f", (each.offset_untreated, each.offset_switched, each.offset_control)),
                    (".0f", (each.score_untreated, each.score_switched, each.score_control)),
                    (".3f", (each.loss_untreated, each.loss_switched, each.loss_control)),
                )
            ),
            "quiet" if not each.control_warnings else f"warned {each.control_warnings}",
            f"{each.processor_seconds:.0f}",
        )
    console.print(table)
    console.print("offset, score, loss at the end: baseline, switched, float32 control. seconds: of the processor.")
    for processor in dict.fromkeys(each.processor for each in found):
        here = [each for each in found if each.processor == processor]
        console.print(
            f"processor {processor}: of {len(here)} seeds {sum(each.warned_step is not None for each in here)} warned "
            f"about, {sum(each.undone for each in here)} undone by the switch, "
            f"{sum(not each.control_warnings for each in here)} with a quiet control, "
            f"{sum(each.kept for each in here)} all three",
            highlight=False,
        )


def run_through_transformers(
    recipe_name: str, console: Console, *, arm_name: str, seed: int, steps: int | None, trace: Path
) -> None:
    """Train one arm of a recipe by transformers' model and Trainer, write its trace and say how it ended."""
    from foreshock.lab.training.transformers_run import transformers_run

    transformers_run(find_recipe(recipe_name), find_arm(arm_name), seed=seed, trace=trace, steps=steps)
    compare([trace], console, picture=None)
    console.print(f"trace: {trace}")


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
    """Train one arm of a recipe, write its trace and say how it ended."""
    from foreshock.lab.training.run import lab_run

    recipe, arm = find_recipe(recipe_name), find_arm(arm_name)
    with Progress(*COLUMNS, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        bar = progress.add_task(f"{recipe.name} {variant(arm.name)}", total=steps or recipe.steps, loss=float("nan"))

        def stepped(step: int, loss: SupportsFloat) -> None:
            if step % 10 == 0 or step == (steps or recipe.steps):
                progress.update(bar, completed=step, loss=float(loss))

        lab_run(recipe, arm, seed=seed, trace=trace, steps=steps, checkpoint=checkpoint, url=url, on_step=stepped)
    compare([trace], console, picture=None)
    console.print(f"trace: {trace}")
