"""The picture of a diagnosis: a head's course, and who carries the error of delta."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreshock.lab.diagnosis.anatomy import Examined
from foreshock.lab.diagnosis.head_anatomy import cosines_of
from foreshock.lab.recording.history import History

_ERROR, _COURSE = "#d55e00", "#0072b2"


def draw(
    path: Path, head: tuple[int, int], histories: Sequence[History], examined: dict[int, list[Examined]], title: str
) -> None:
    """Write a PNG of one head. Panels for which there is no data are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = examined.get(head[0], [])
    rows = (1 if histories else 0) + (2 if batches else 0)
    figure = Figure(figsize=(11, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = iter(figure.subplots(rows, 2, squeeze=False).flat)
    if histories:
        _courses(next(axes), next(axes), head, histories)
    if batches:
        _carriers(next(axes), next(axes), head[1], batches)
        _directions(next(axes), next(axes), head[1], batches)
    figure.suptitle(f"{title}: layer {head[0]} head {head[1]}")
    figure.savefig(path, dpi=130)


def _courses(offset: Any, bias: Any, head: tuple[int, int], histories: Sequence[History]) -> None:
    for history, style in zip(histories, ("-", "--", ":", "-.") * len(histories), strict=False):
        offset.plot(
            history.steps, history.course("head.score_offset", head), style, color=_COURSE, linewidth=1.2,
            label=history.name,
        )  # fmt: skip
        steps, share = history.blocks("head.delta_bias", head)
        bias.plot(steps, np.cumsum(share * np.diff(steps, prepend=0.0)), style, color=_ERROR, linewidth=1.2)
        for verdict in history.verdicts:
            if verdict.state == "raised" and (verdict.layer, verdict.head) == head:
                offset.axvline(verdict.step, color="black", linewidth=0.8, linestyle=":")
    offset.set(xlabel="optimizer step", ylabel="score offset (nats)")
    offset.legend(fontsize=7)
    bias.set(xlabel="optimizer step", ylabel="one-sidedness of\ndelta_lp - delta_hp, summed over steps")
    bias.axhline(0, color="grey", linewidth=0.6)


def _carriers(positions: Any, features: Any, head: int, batches: list[Examined]) -> None:
    error = torch.stack([each.delta_error[:, head] for each in batches]).abs().mean((0, 1))
    positions.bar(range(len(error)), error.tolist(), width=1.0, color=_ERROR)
    positions.set(xlabel="token position", ylabel="mean |delta_lp - delta_hp|")
    by_feature = torch.stack([each.by_feature[head] for each in batches]).sum(0)
    features.bar(range(len(by_feature)), by_feature.tolist(), color=_ERROR)
    features.axhline(0, color="grey", linewidth=0.6)
    features.set(xlabel="feature of O", ylabel="sum of dO (O_lp - O_hp)")


def _directions(matrix: Any, spectrum: Any, head: int, batches: list[Examined]) -> None:
    directions, _, mixed, _ = cosines_of(batches, head)
    shown = mixed if directions is None else directions
    name = "(PK)[T]" if directions is None else "(PK)[T]ᵀX[T]"
    picture = matrix.imshow(shown.numpy(), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
    matrix.figure.colorbar(picture, ax=matrix, label="cosine")
    matrix.set(xlabel="sampled token", ylabel="sampled token", title=f"directions {name}")
    values = torch.linalg.eigvalsh(shown).flip(0)[:24]
    spectrum.bar(range(1, len(values) + 1), (values / shown.trace()).tolist(), color=_COURSE)
    spectrum.set(xlabel="eigenvalue of the matrix of cosines", ylabel="share")
