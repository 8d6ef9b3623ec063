"""`foreshock lab score` as text on the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foreshock.cli.output import print_whole
from foreshock.lab.recording.packed import PACKED, RECORDED
from foreshock.lab.scoring.table import lab_score

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
"""Of a bar that shows how far a long command is."""


def score(traces: Sequence[Path], console: Console, *, report: Path | None, seal: Path | None = None) -> None:
    """Score recorded runs and print a line for each, and one for each monitor."""
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        bar = progress.add_task("scoring", total=len(traces))
        scores, result = lab_score(traces, report=report, seal=seal, on_trace=lambda _: progress.advance(bar))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trace")
    for name in ("truth", "steps", "warned", "layer", "head", "signal", "cause", "forecast", "at 512", "quality loss"):
        table.add_column(name, justify="right")
    for each in scores:
        cells = (
            each.truth,
            each.steps,
            each.first_warning_step,
            each.layer,
            each.head,
            each.signal,
            each.cause,
            None if each.forecast_steps is None else round(each.forecast_steps),
            each.dangerous_step,
            each.harm_step,
        )
        table.add_row(Path(each.file).name.removesuffix(RECORDED).removesuffix(PACKED), *map(cell, cells))
    print_whole(table, console)
    console.print(
        "warned: step of the first warning. forecast: steps from then until the head's largest |score| is 512."
    )
    console.print(
        "at 512: step at which it was. quality loss: where it begins, in loss or gradient norm, against the control.\n"
    )
    _print_monitors(result["table"], console)
    _print_incidents(result["incidents"], console)
    _print_forecasts(result["forecasts"], console)
    if report is not None:
        console.print(f"report: {report}")


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
        table = Table(box=None, pad_edge=False, header_style="bold", title=f"{truth} runs", title_justify="left")
        table.add_column("family")
        for name in ("tuned", "runs", *names):
            table.add_column(name, justify="right")
        for row in (row for row in rows if row.truth == truth):
            counts = (row.warned, row.as_rounding)
            rest = (row.median_lead, row.least_lead, row.false_heads)
            cells = (*counts, *(rest if truth == "failing" else (row.false_heads, row.most_in_a_stretch)))
            table.add_row(row.family, "yes" if row.tuned else "no", str(row.runs), *map(cell, cells))
        print_whole(table, console)
        console.print()
    console.print("Nothing was trained. tuned: whether runs of the family were looked at while the rule was chosen.")
    if report is not None:
        console.print(f"report: {report}")


def _print_monitors(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table for each split: detection, lead and false alarms of every monitor."""
    for split in dict.fromkeys(row["split"] for row in rows):
        shown = Table(box=None, pad_edge=False, header_style="bold", title=f"{split} runs", title_justify="left")
        shown.add_column("monitor")
        columns = (
            "threshold",
            "warned",
            "in time",
            "lead",
            "to 512",
            "false alarms",
            "per 10k",
            "at most",
            "cause right",
        )
        for name in columns:
            shown.add_column(name, justify="right")
        for row in (row for row in rows if row["split"] == split):
            shown.add_row(
                row["monitor"],
                f"{row['threshold']:.4g} {row['kind']}",
                f"{row['warned']}/{row['failures']}",
                f"{row['in_time']}/{row['failures']}",
                cell(row["median_lead_steps"]),
                cell(row["median_lead_to_dangerous_steps"]),
                cell(row["false_alarms"] if row["healthy_steps"] else None),
                cell(row["false_alarms_per_10k"]),
                cell(row["upper_bound_per_10k"]),
                f"{row['causes_right']}/{row['causes']}" if row["causes"] else "-",
            )
        print_whole(shown, console)
        console.print(f"healthy steps: {max(row['healthy_steps'] for row in rows if row['split'] == split):,}\n")


def _print_incidents(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """How often people would have been called, and for what."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title="incidents", title_justify="left")
    for name in ("split", "runs that", "runs", "steps", "incidents", "undecided", "quiet runs", "false per 500k"):
        shown.add_column(name, justify="left" if name in ("split", "runs that") else "right")
    for name in ("at most", "head named", "cause right"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            *(row["split"], _GROUPS[row["group"]], str(row["runs"]), f"{row['steps']:,}", str(row["incidents"])),
            str(row["undecided"]) if row["group"] == "did not fail" else "-",
            f"{row['quiet_runs']}/{row['runs']}{_interval(row, 'quiet', '.0%')}",
            *map(cell, (row["false_per_500k"], row["at_most_per_500k"])),
            "-" if row["named"] is None else f"{row['named']}/{row['named_of']}{_interval(row, 'named', '.0%')}",
            "-" if row["causes_right"] is None else f"{row['causes_right']}/{row['causes']}",
        )
    print_whole(shown, console)
    console.print(
        "incidents: all warnings of one cause are one. undecided: quality loss was expected after the run's end. "
        "head named: the head that fails was among the first three as late as a warning is in time. Brackets: 95 %, "
        "over runs.\n"
    )


_GROUPS = {
    "healthy": "are healthy",
    "treated": "were treated",
    "did not fail": "did not fail",
    "failed": "failed",
    "other": "failed otherwise",
}


def _print_forecasts(splits: dict[str, Any], console: Console) -> None:
    """How often the range that was given at a head's first warning held."""
    for split, found in splits.items():
        counts = ", ".join(f"{count} {what}" for what, count in found["outcomes"].items() if count)
        share = "-" if found["share_inside"] is None else f"{found['share_inside']:.0%}"
        held = f"{share}{_interval(found, 'share_inside', '.0%')} of {found['decided']}"
        console.print(f"forecasts, {split}: the range held in {held}; {counts or 'none was made'}", soft_wrap=True)
        closed = found["with_latest"]
        if closed["decided"]:
            share = f"{closed['share_inside']:.0%}{_interval(closed, 'share_inside', '.0%')}"
            console.print(f"  of those that gave a latest step: {share} of {closed['decided']}", soft_wrap=True)
    console.print()


def _interval(row: dict[str, Any], name: str, form: str) -> str:
    """An interval in brackets; empty where nobody can say."""
    interval = row[f"{name}_interval"]
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
