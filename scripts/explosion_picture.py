"""Draws docs/images/explosion.png from recorded runs: a loss that explodes, its warning, and the run that was mended.

The three runs are of one recipe and seed (lab/traces/README.md); nothing in the picture is drawn by hand.
"""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.lab.recording.trace import Trace, read_trace

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "lab" / "traces" / "cure"
ARMS = {
    "untreated": ("BF16, not treated", "#d55e00"),
    "rescued-all-row-corrected": ("BF16, switched by foreshock at its warning", "#0072b2"),
    "control": ("the same in float32", "#7f7f7f"),
}


def first_warning(trace: Trace) -> wire.Verdict:
    """The first warning that was raised while the run was recorded."""
    return next(e for e in trace.events if isinstance(e, wire.Verdict) and e.state == "raised")


def main(path: Path = ROOT / "docs" / "images" / "explosion.png") -> Path:
    """Write the picture; returns its file."""
    traces = {arm: read_trace(RUNS / f"shared-values_{arm}_seed2.trace.xz") for arm in ARMS}
    warning = first_warning(traces["untreated"])
    row = traces["untreated"].heads.index((warning.layer or 0, warning.head or 0))
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for arm, (label, colour) in ARMS.items():
        samples = [s for s in traces[arm].samples if s.states is not None]
        steps = [s.step for s in samples]
        offsets = [catalog.read("head.score_offset", words)[row] for s in samples if (words := s.words()) is not None]
        above.plot(steps, np.abs(offsets), color=colour, linewidth=1.2, label=label)
        losses = [np.nan if s.loss is None else s.loss for s in samples]
        below.plot(steps, losses, color=colour, linewidth=1.2)
    above.set_yscale("log")
    above.set_ylabel(f"score offset of\nlayer {warning.layer} head {warning.head} (nats)")
    below.set_ylabel("training loss")
    below.set_ylim(0.8, 3.6)
    below.set_xlabel("optimizer step")
    for axis in (above, below):
        axis.axvline(warning.step, color="black", linestyle=":", linewidth=1)
        axis.grid(alpha=0.3)
    below.annotate(f" first warning, step {warning.step}", (warning.step, 3.3), fontsize=9)
    above.legend(loc="upper left", fontsize=9)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    print(main())
