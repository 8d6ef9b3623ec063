"""Terminal output of `foreshock lab score`; docs/scoring.md explains the columns of its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_json
from rich.console import Console

from foreshock.cli.output import print_whole, table_of
from foreshock.lab.scoring.score import lab_score

_OF_A_RUN: Final = (
    *("trace", "truth", "steps", "first_warning_step", "layer", "head", "signal", "cause", "forecast_steps"),
    *("dangerous_step", "harm_step"),
)


def score(traces: Sequence[Path], console: Console, *, report: Path | None) -> None:
    """Score recorded runs, and print tables of runs, monitors, healthy runs, causes and forecasts."""
    scores, result = lab_score(traces, report=report)
    _show(console, "Runs", [{name: getattr(each, name) for name in _OF_A_RUN} for each in scores])
    _show(console, "Monitors", result["table"])
    _show(console, "Healthy runs", result["healthy"])
    _show(console, "Observed runs that were first warned about as rounding", [result["precision"]])
    _show(console, "Heads that a first warning forecast, and that came to 512", [result["forecasts"]])
    if report is not None:
        console.print(f"report: {report}")


def score_synthetic(console: Console, *, report: Path | None) -> None:
    """Score synthetic runs and print a line for each family."""
    from foreshock.lab.scoring.synthetic import score_synthetic

    rows = list(score_synthetic())
    _show(console, "Made-up runs, of which nothing was trained", list(map(asdict, rows)))
    if report is not None:
        report.write_bytes(to_json(rows, indent=1) + b"\n")
        console.print(f"report: {report}")


def _show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    console.print(f"[bold]{title}[/bold]")
    print_whole(table_of(rows), console)
    console.print()
