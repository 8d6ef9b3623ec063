"""The course of a recorded run as figures and a picture, for pages that cite it.

    python -P -m foreshock.lab.shown.curves TRACE --head 1.5 --head 3.3 --every 100 --json FILE --picture FILE

The figures hold the verdicts as they were given, and for each part of `every` steps the loss, the gradient norm and
what the named heads reached.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import Slot
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE

_READ: Final = {
    "offset": "head.score_offset",
    "largest_score": "head.row_max_abs",
    "tied_rows": "head.tied_rows_bf16",
    "delta_bias": "head.delta_bias",
}
"""Names of the figures, and the metrics of the catalogue that they are."""
Curve = list[dict[str, float | None]]
"""What is shown of one head, by sample."""


def head_curves(trace: Trace, heads: Sequence[tuple[int, int]]) -> dict[str, Curve]:
    """What _READ names of these heads at each sample that holds them, and the norm of W_Q as it was measured last.

    Raises ValueError for a head that was not recorded.
    """
    if strange := [head for head in heads if head not in trace.heads]:
        raise ValueError("layer {} head {} was not recorded; layers and heads count from 0".format(*strange[0]))
    rows = {name_of(head): trace.heads.index(head) for head in heads}
    curves: dict[str, Curve] = {name: [] for name in rows}
    norms: dict[str, float] = {}
    for sample in trace.samples:
        if sample.query_norm is not None:
            measured = sample.query_norm.numpy()
            norms = {name: float(measured[row]) for name, row in rows.items()}
        if (words := sample.words()) is None:
            continue
        read = {name: catalog.read(key, words) for name, key in _READ.items()}
        for name, row in rows.items():
            if words[row, Slot.ROWS]:
                values = {each: float(known[row]) for each, known in read.items()}
                curves[name].append({"step": sample.step, **values, "query_norm": norms.get(name)})
    return curves


def name_of(head: tuple[int, int]) -> str:
    """layer 1 head 5"""
    return "layer {} head {}".format(*head)


def _compared(trace: Trace) -> dict[str, float]:
    """Rows of the model's own attention that were compared with their recomputation, those that were wrong, and the
    largest distance as a share of the bound."""
    every = [words for sample in trace.samples if (words := sample.words()) is not None]
    return {
        "rows": sum(int(words[:, Slot.CHECKED_ROWS].sum()) for words in every),
        "wrong": sum(int(words[:, Slot.WRONG_ROWS].sum()) for words in every),
        "largest_share_of_bound": max(
            [0.0, *(float(w.view(np.float64)[:, Slot.OUTPUT_ERROR_MAX].max()) for w in every)]
        ),
    }


def course(trace: Trace, curves: Mapping[str, Curve], every: int) -> dict[str, Any]:
    """The verdicts, and the last values of each part of `every` steps; loss and gradient norm as medians of a part."""
    part = (trace.steps.step - 1) // every
    parts = [
        {
            "last_step": int(trace.steps.step[part == number][-1]),
            "loss": float(np.median(trace.steps.loss[part == number])),
            "grad_norm": float(np.median(trace.steps.grad_norm[part == number])),
        }
        for number in np.unique(part)
    ]
    return {
        "header": trace.header,
        "samples": len(trace.samples),
        "compared_outputs": _compared(trace),
        "verdicts": [e.model_dump(mode="json") for e in trace.events if isinstance(e, wire.Verdict)],
        "parts": parts,
        "heads": {
            name: {
                "first_score_of_512": next(
                    (c["step"] for c in curve if (c["largest_score"] or 0) >= DANGEROUS_SCORE), None
                ),
                "first_offset_of_50": next((c["step"] for c in curve if abs(c["offset"] or 0) >= 50), None),
                "curve": list({(int(c["step"] or 0) - 1) // every: c for c in curve}.values()),
            }
            for name, curve in curves.items()
        },
    }


def draw(trace: Trace, curves: Mapping[str, Curve], path: Path) -> None:
    """Largest score of the heads and the loss by step, with a line at each first warning of one of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (scores, losses) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=[2, 1], layout="tight")
    raised = [event for event in trace.events if isinstance(event, wire.Verdict) and event.state == "raised"]
    for number, (name, curve) in enumerate(curves.items()):
        colour = f"C{number}"
        scores.plot([p["step"] for p in curve], [p["largest_score"] for p in curve], color=colour, label=name)
        for event in raised:
            if name == f"layer {event.layer} head {event.head}":
                scores.axvline(event.step, color=colour, linestyle="--", linewidth=1)
                words = f" {event.step}: {event.cause}"
                scores.text(event.step, 1.5, words, color=colour, rotation=90, ha="right")
    scores.axhline(DANGEROUS_SCORE, color="gray", linestyle=":", label=f"a score of {DANGEROUS_SCORE:.0f}")
    scores.set(yscale="log", ylabel="largest |score|")
    scores.legend()
    losses.plot(trace.steps.step, trace.steps.loss, color="black", linewidth=0.7)
    losses.set(xlabel="step", ylabel="loss", ylim=(0, min(4.0, float(np.nanmax(trace.steps.loss)))))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    trace: Path,
    head: Annotated[list[str], typer.Option(help="LAYER.HEAD, from 0; once for each head.")],
    every: Annotated[int, typer.Option(min=1)] = 100,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    picture: Path | None = None,
) -> None:
    """Write the figures and the picture of one trace."""
    pairs = [tuple(map(int, name.split("."))) for name in head]
    read = read_trace(trace)
    curves = head_curves(read, [(pair[0], pair[1]) for pair in pairs])
    if json_path is not None:
        json_path.write_text(json.dumps(course(read, curves, every), indent=1) + "\n")
    if picture is not None:
        draw(read, curves, picture)


if __name__ == "__main__":
    typer.run(main)
