"""Draws recorded runs of one recipe and seed (lab/traces/README.md): a loss that explodes, and the run that was warned
about and switched. Nothing in it is drawn by hand."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.lab.recording.trace import Trace, read_trace

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "src/foreshock/lab" / "traces" / "paper"
RUNS = {
    PAPER / "paper-gpt2-64k_flash-rescued_seed1.trace.xz": (
        "PyTorch's flash attention, switched by foreshock at its warning",
        "#0072b2",
    ),
    PAPER / "paper-gpt2-64k_flash-untreated_seed1.trace.xz": ("the same, not treated", "#d55e00"),
    PAPER / "branched" / "paper-gpt2-64k_control_seed1.trace.xz": (
        "attention in float32 from step 3,500 on",
        "#7f7f7f",
    ),
}
"""File of each run, its label and colour. The first one's warning is shown."""
LOSSES = (1.0, 6.0)
"""Least and largest loss that is shown."""


def first_warning(trace: Trace) -> wire.Verdict:
    """The first warning that was raised while the run was recorded."""
    return next(e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised")


def draw(folder: Path = ROOT / "docs" / "images") -> Path:
    """Write the picture; returns its file."""
    traces = {file: read_trace(file) for file in RUNS}
    switched = next(iter(traces.values()))
    warning = first_warning(switched)
    row = switched.heads.index((warning.layer or 0, warning.head or 0))
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for file, (label, colour) in RUNS.items():
        samples = [s for s in traces[file].samples if s.states is not None]
        steps = [s.step for s in samples]
        offsets = [catalog.read("head.score_offset", words)[row] for s in samples if (words := s.words()) is not None]
        above.plot(steps, np.abs(offsets), color=colour, linewidth=1.2, label=label)
        losses = [np.nan if s.loss is None else s.loss for s in samples]
        below.plot(steps, losses, color=colour, linewidth=1.2)
    above.set_yscale("log")
    above.set_ylabel(f"score offset of\nlayer {warning.layer} head {warning.head} (nats)")
    below.set_ylabel("training loss")
    below.set_ylim(*LOSSES)
    below.set_xlabel("optimizer step")
    for axis in (above, below):
        axis.axvline(warning.step, color="black", linestyle=":", linewidth=1)
        axis.grid(alpha=0.3)
    top = LOSSES[0] + 0.9 * (LOSSES[1] - LOSSES[0])
    below.annotate(f" first warning, step {warning.step}", (warning.step, top), fontsize=9)
    above.legend(loc="upper left", fontsize=9)
    path = folder / "paper-run.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    print(draw())
