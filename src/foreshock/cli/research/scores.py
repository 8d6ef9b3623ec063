"""`foreshock lab score` as text on the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foreshock.cli.output import print_whole
from foreshock.lab.scoring.score import lab_score

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
"""Of a bar that shows how far a long command is."""


def score(traces: Sequence[Path], console: Console, *, report: Path | None) -> None:
    """Score recorded runs and print a line for each, one for each monitor, and what healthy runs and causes come to."""
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        bar = progress.add_task("scoring", total=len(traces))
        scores, result = lab_score(traces, report=report, on_trace=lambda _: progress.advance(bar))
    heads = ("truth", "steps", "warned", "layer", "head", "signal", "cause", "forecast", "at 512", "quality loss")
    rows = [
        (
            *(each.trace, each.truth, each.steps, each.first_warning_step, each.layer, each.head, each.signal),
            *(each.cause, each.forecast_steps and round(each.forecast_steps), each.dangerous_step, each.harm_step),
        )
        for each in scores
    ]
    _show(console, ("trace", *heads), rows)
    console.print(
        "warned: step of the first warning. forecast: steps from then until the head's largest |score| is 512. at 512: "
        "step at which that of any head was. quality loss: where it begins, in loss or gradient norm, against the "
        "control.\n"
    )
    of_monitors = (
        "threshold",
        "warned before 512",
        "lead",
        "range",
        "in time",
        "others",
        "healthy runs",
        "false alarms",
    )
    monitors = [
        (
            *(row["monitor"], row["threshold"], f"{row['warned']} of {row['dangerous']}", row["median_lead"]),
            *(f"{cell(row['least_lead'])} to {cell(row['most_lead'])}", f"{row['in_time']} of {row['harmed']}"),
            *(f"{row['others_warned']} of {row['others']}", f"{row['healthy_warned']} of {row['healthy']}"),
            f"{row['false_alarms']} of {row['possible_alarms']}",
        )
        for row in result["table"]
    ]
    _show(console, ("monitor", *of_monitors), monitors)
    console.print(
        "lead: steps to 512, median and range. in time: of those that lost quality. others: failures that are not of "
        "rounding. healthy runs: that were warned about.\n"
    )
    tuned = {None: "", True: "yes", False: "no"}
    sets = [
        (e["set"], tuned[e["tuned"]], *(f"{e[n]:,}" for n in ("runs", "steps", "warned"))) for e in result["healthy"]
    ]
    _show(console, ("healthy runs of", "tuned", "runs", "steps", "warned about"), sets)
    came = result["precision"]
    console.print(
        f"Of {came['warned_as_rounding']} observed runs that were first warned about as rounding {came['failed']} "
        f"failed; of the others {came['cut_short']} were cut short and {came['ran_to_the_end']} ran to their end.",
        soft_wrap=True,
    )
    ahead = result["forecasts"]
    console.print(
        f"Of {ahead['came']} heads that a first warning forecast {ahead['not_earlier']} came to 512 no earlier than it "
        f"said, after {cell(ahead['least_part'])} to {cell(ahead['most_part'])} times the likely steps.",
        soft_wrap=True,
    )
    if report is not None:
        console.print(f"report: {report}")


def _show(console: Console, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table whose first column has names, and its others values."""
    first, *rest = heads
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(first)
    for name in rest:
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(*map(cell, row))
    print_whole(shown, console)


def score_synthetic(console: Console, *, report: Path | None) -> None:
    """Score made-up runs and print a line for each family."""
    from foreshock.lab.scoring.synthetic import FAMILIES, score_synthetic

    with Progress(*COLUMNS, console=console, transient=True) as progress:
        bar = progress.add_task("scoring", total=len(FAMILIES) + 1)
        rows = score_synthetic(report=report, on_row=lambda _: progress.advance(bar))
    columns = {
        "failing": ("warned before 512", "as rounding", "median lead", "least lead", "other heads warned"),
        "healthy": ("runs warned", "as rounding", "heads warned", "most in a sixth"),
    }
    for truth, names in columns.items():
        table = [
            (
                *(row.family, "yes" if row.tuned else "no", row.runs, row.warned, row.as_rounding),
                *((row.median_lead, row.least_lead, row.false_heads) if truth == "failing" else ()),
                *((row.false_heads, row.most_in_a_stretch) if truth == "healthy" else ()),
            )
            for row in rows
            if row.truth == truth
        ]
        _show(console, (f"{truth} runs", "tuned", "runs", *names), table)
        console.print()
    console.print("Nothing was trained. tuned: whether runs of the family were looked at while the rule was chosen.")
    if report is not None:
        console.print(f"report: {report}")


def cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
