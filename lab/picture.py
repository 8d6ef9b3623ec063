"""The closing picture of a comparison: offset, largest score and loss by step, one line for each variant."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foreshock.lab.recording.record import Record

_COLOURS = {
    "baseline": "#d55e00",
    "rescued": "#0072b2",
    "control": "#7f7f7f",
    "exact-delta": "#009e73",
    "paper": "#cc79a7",
}
"""Told apart by colour-blind eyes as well (Okabe and Ito)."""
_STEEP = 1000.0
"""Offsets and scores beyond it are drawn on a logarithmic axis."""


def draw(
    path: Path, records: Mapping[str, Record], head: tuple[int, int], title: str, marks: Mapping[str, int | None]
) -> None:
    """Write a PNG. `head` is the one whose offset and score are shown; `marks` are steps worth a vertical line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    named = f"layer {head[0]} head {head[1]}"
    panels = (
        ("offset", f"score offset of {named} (nats)"),
        ("score", f"largest |score| of {named}"),
        ("loss", "training loss (nats)"),
    )
    for axis, (quantity, label) in zip(axes, panels, strict=True):
        for name, record in records.items():
            steps, values = record.series(quantity, head)
            axis.plot(steps, values, label=name, color=_COLOURS.get(name), linewidth=1.3)
            if quantity != "loss" and np.nanmax(np.abs(values), initial=0.0) > _STEEP:
                axis.set_yscale("symlog", linthresh=10.0)
        for row, (text, step) in enumerate(marks.items()):
            if step is not None:
                axis.axvline(step, color="black", linewidth=0.8, linestyle=":")
                place = (step, 0.97 - 0.1 * row)
                axis.annotate(f" {text}", place, xycoords=("data", "axes fraction"), fontsize=8, va="top")
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
    losses = [loss for record in records.values() for loss in record.losses[len(record.losses) // 20 :]]
    axes[2].set_ylim(min(losses) - 0.05, max(losses) + 0.05)
    axes[2].set_xlabel("optimizer step")
    axes[0].legend(loc="upper left")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
