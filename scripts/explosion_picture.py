"""Draws pictures of recorded runs: a loss that explodes, its warning, and the run of the same seed that does not.

The runs of one picture are of one recipe and seed (lab/traces/README.md); nothing in it is drawn by hand.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.lab.recording.trace import Trace, read_trace

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "lab" / "traces"
RUNS, PAPER = TRACES / "cure", TRACES / "paper"


class Picture(NamedTuple):
    name: str
    runs: dict[Path, tuple[str, str]]
    """File of each run, its label and colour. The first one is warned about."""
    losses: tuple[float, float]
    """Least and largest loss that is shown."""


PICTURES = (
    Picture(
        "explosion",
        {
            RUNS / "shared-values_untreated_seed2.trace.xz": ("BF16, not treated", "#d55e00"),
            RUNS / "shared-values_rescued-all-row-corrected_seed2.trace.xz": (
                "BF16, switched by foreshock at its warning",
                "#0072b2",
            ),
            RUNS / "shared-values_control_seed2.trace.xz": ("the same in float32", "#7f7f7f"),
        },
        (0.8, 3.6),
    ),
    Picture(
        "paper-run",
        {
            PAPER / "paper-gpt2-64k_flash-untreated_seed1.trace.xz": (
                "PyTorch's flash attention, not treated",
                "#d55e00",
            ),
            PAPER / "paper-gpt2-64k_row-corrected_seed1.trace.xz": ("row_corrected from step 1 on", "#0072b2"),
            PAPER / "branched" / "paper-gpt2-64k_control_seed1.trace.xz": (
                "attention in float32 from step 3,500 on",
                "#7f7f7f",
            ),
        },
        (1.0, 6.0),
    ),
)


def first_warning(trace: Trace) -> wire.Verdict:
    """The first warning that was raised while the run was recorded."""
    return next(e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised")


def draw(picture: Picture, folder: Path = ROOT / "docs" / "images") -> Path:
    """Write the picture; returns its file."""
    traces = {file: read_trace(file) for file in picture.runs}
    failing = next(iter(traces.values()))
    warning = first_warning(failing)
    row = failing.heads.index((warning.layer or 0, warning.head or 0))
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for file, (label, colour) in picture.runs.items():
        samples = [s for s in traces[file].samples if s.states is not None]
        steps = [s.step for s in samples]
        offsets = [catalog.read("head.score_offset", words)[row] for s in samples if (words := s.words()) is not None]
        above.plot(steps, np.abs(offsets), color=colour, linewidth=1.2, label=label)
        losses = [np.nan if s.loss is None else s.loss for s in samples]
        below.plot(steps, losses, color=colour, linewidth=1.2)
    above.set_yscale("log")
    above.set_ylabel(f"score offset of\nlayer {warning.layer} head {warning.head} (nats)")
    below.set_ylabel("training loss")
    below.set_ylim(*picture.losses)
    below.set_xlabel("optimizer step")
    for axis in (above, below):
        axis.axvline(warning.step, color="black", linestyle=":", linewidth=1)
        axis.grid(alpha=0.3)
    top = picture.losses[0] + 0.9 * (picture.losses[1] - picture.losses[0])
    below.annotate(f" first warning, step {warning.step}", (warning.step, top), fontsize=9)
    above.legend(loc="upper left", fontsize=9)
    path = folder / f"{picture.name}.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    for each in PICTURES:
        print(draw(each))
