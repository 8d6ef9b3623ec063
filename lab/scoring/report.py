"""`foreshock lab score`: the scores of recorded runs as JSON, and lead against false alarms as a picture."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foreshock.lab.scoring.score import OURS, Score, score_all
from foreshock.lab.scoring.sealed import break_seal
from foreshock.lab.scoring.table import as_json
from foreshock.monitor.detect.detectors import DetectorConfig

_NO_ALARM: Final = 1e-2
"""Where a rate of zero is drawn on the logarithmic axis, in alarms per 10,000 steps."""


def lab_score(
    paths: Sequence[Path],
    *,
    report: Path | None = None,
    picture: Path | None = None,
    config: DetectorConfig | None = None,
    seal: Path | None = None,
    on_trace: Callable[[Path], None] = lambda path: None,
) -> tuple[list[Score], dict[str, Any]]:
    """Score every trace; the scores, and what `report` gets as JSON: traces, table, incidents, forecasts, curves.

    `picture` gets the curves as a PNG; it needs a healthy and a harmed run among the traces. `seal` is where it is
    written down that held-out runs on real text were scored. Raises ValueError for a file that is no trace, for a
    picture that would be empty, and for held-out runs that may not be scored (`foreshock.lab.scoring.sealed`).
    """
    break_seal(paths, config or DetectorConfig(), seal)
    scores = score_all(paths, config, on_trace)
    result = as_json(scores)
    if report is not None:
        report.write_text(json.dumps(_plain(result), indent=1) + "\n")
    if picture is not None:
        if not result["curves"]:
            raise ValueError(
                "there is no curve to draw: give at least one healthy run and one natural rounding failure that came "
                "to harm (its control among the traces)"
            )
        draw_curves(picture, result["curves"], result["table"])
    return scores, result


def _plain(value: Any) -> Any:
    """The same without what strict JSON lacks: a number that is not finite becomes its name."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def draw_curves(path: Path, curves: Mapping[str, list[dict[str, float]]], table: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG: median lead over the natural failures against false alarms, one line for each monitor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for monitor, points in curves.items():
        if monitor.startswith(f"{OURS}: "):
            continue
        ours = monitor == OURS
        axis.plot(
            [max(point["false_alarms_per_10k"], _NO_ALARM) for point in points],
            [point["median_lead_steps"] for point in points],
            label=monitor,
            color="black" if ours else None,
            linewidth=2.4 if ours else 1.2,
            marker="o",
            markersize=3,
        )
    axis.set_xscale("log")
    axis.set_xlabel(f"false alarms per 10,000 healthy steps (none is drawn at {_NO_ALARM:g})")
    axis.set_ylabel("median steps of lead before the first harm")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    failures = max((row["failures"] for row in table), default=0)
    figure.suptitle(f"Warning time of every monitor as its threshold moves ({failures} natural failures)")
    figure.savefig(path, dpi=130)
