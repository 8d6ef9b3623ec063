"""The course of a recorded run as figures and a picture, for pages that cite it.

    python -P -m foreshock.lab.shown.curves TRACE --head 1.5 --head 3.3 --every 100 --json FILE --picture FILE

The figures hold the verdicts as they were given, and for each part of `every` steps the loss, the gradient norm and
what the named heads reached.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import Slot
from foreshock.lab.recording.trace import Trace, read_trace

_READ: Final = {
    "offset": "head.score_offset",
    "largest_score": "head.row_max_abs",
    "tied_rows": "head.tied_rows_bf16",
    "delta_bias": "head.delta_bias",
}
"""Names of the figures, and the metrics of the catalogue that they are."""
_LIMIT: Final = 512
"""The largest |score| that docs/detectors.md calls dangerous."""


def head_curve(trace: Trace, layer: int, head: int) -> list[dict[str, float | None]]:
    """What _READ names of one head at each sample that holds it, and the norm of W_Q as it was measured last.

    Raises ValueError for a head that was not recorded.
    """
    if (layer, head) not in trace.heads:
        raise ValueError(f"layer {layer} head {head} was not recorded; layers and heads count from 0")
    row, norm = trace.heads.index((layer, head)), None
    curve: list[dict[str, float | None]] = []
    for sample in trace.samples:
        if sample.query_norm is not None:
            norm = float(sample.query_norm.numpy()[row])
        words = sample.words()
        if words is None or not words[row, Slot.ROWS]:
            continue
        read = {name: float(catalog.read(key, words[row : row + 1])[0]) for name, key in _READ.items()}
        curve.append({"step": sample.step, **read, "query_norm": norm})
    return curve


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


def course(trace: Trace, heads: Sequence[tuple[int, int]], every: int) -> dict[str, Any]:
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
    curves = {f"layer {layer} head {head}": head_curve(trace, layer, head) for layer, head in heads}
    return {
        "header": trace.header,
        "samples": len(trace.samples),
        "compared_outputs": _compared(trace),
        "verdicts": [e.model_dump(mode="json") for e in trace.events if isinstance(e, wire.Verdict)],
        "parts": parts,
        "heads": {
            name: {
                "first_score_of_512": next((c["step"] for c in curve if (c["largest_score"] or 0) > _LIMIT), None),
                "first_offset_of_50": next((c["step"] for c in curve if abs(c["offset"] or 0) >= 50), None),
                "curve": list({(int(c["step"] or 0) - 1) // every: c for c in curve}.values()),
            }
            for name, curve in curves.items()
        },
    }


def draw(trace: Trace, heads: Sequence[tuple[int, int]], path: Path) -> None:
    """Largest score of the heads and the loss by step, with a line at each first warning of one of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (scores, losses) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=[2, 1], layout="tight")
    raised = [event for event in trace.events if isinstance(event, wire.Verdict) and event.state == "raised"]
    for number, (layer, head) in enumerate(heads):
        curve = head_curve(trace, layer, head)
        steps = [point["step"] for point in curve]
        scores.plot(steps, [p["largest_score"] for p in curve], color=f"C{number}", label=f"layer {layer} head {head}")
        for event in raised:
            if (event.layer, event.head) == (layer, head):
                scores.axvline(event.step, color=f"C{number}", linestyle="--", linewidth=1)
                scores.text(
                    event.step, 1.5, f" {event.step}: {event.cause}", color=f"C{number}", rotation=90, ha="right"
                )
    scores.axhline(_LIMIT, color="gray", linestyle=":", label=f"a score of {_LIMIT}")
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
    heads = [(pair[0], pair[1]) for pair in pairs]
    read = read_trace(trace)
    if json_path is not None:
        json_path.write_text(json.dumps(course(read, heads, every), indent=1) + "\n")
    if picture is not None:
        draw(read, heads, picture)


if __name__ == "__main__":
    typer.run(main)
