"""What each mode costs where every head has it: `foreshock bench attention --modes --json FILE`.

Every mode of the list in contract/modes.py that kernels serve, in turn with plain heads and with cuDNN, all with the
statistics of every row. What a change did to a mode's cost, the same command tells in both commits, one after the other
on one quiet host.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from foreshock.benchmarks import machine
from foreshock.benchmarks.attention import Shape, foreshock, sdpa, timed
from foreshock.benchmarks.stopwatch import Stopwatch
from foreshock.contract.modes import MODES, Mode

SHAPES = [
    Shape(head_dim, heads, heads, length, causal)
    for length, causal in ((1024, True), (2048, True), (8192, True), (4096, False))
    for head_dim, heads in ((64, 32), (128, 16))
]
TIMED = {"plain": Mode.PLAIN} | {mode.name: mode.flag for mode in MODES}
PEER = "sdpa_cudnn"
PASSES = ("backward", "both")
RATIOS = (*list(TIMED)[1:], PEER)
"""What is compared with plain heads."""


def measure(shape: Shape, stopwatch: Stopwatch, device: str = "cuda") -> list[dict[str, Any]]:
    """The cells of one shape, one per pass: milliseconds of each mode and of the peer by name, and ratios to plain."""
    calls = {name: foreshock(shape, mode, device=device) for name, mode in TIMED.items()}
    calls[PEER] = sdpa(shape, SDPBackend.CUDNN_ATTENTION)
    return [_with_ratios(cell) for cell in timed(shape, stopwatch, calls, PASSES, device)]


def _with_ratios(cell: dict[str, Any]) -> dict[str, Any]:
    """With how many times as long as plain heads each mode and the peer take; None where it refused the shape."""
    ratios = {name: round(cell[name] / cell["plain"], 4) if cell[name] else None for name in RATIOS}
    return cell | {"ratio_to_plain": ratios}


def summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each head dim, pass and name: geometric mean and largest ratio to plain heads, from S = 2048 on."""
    rows = []
    for head_dim in sorted({cell["head_dim"] for cell in cells}):
        for which in PASSES:
            of = [c for c in cells if (c["head_dim"], c["pass"]) == (head_dim, which) and c["seq_len"] >= 2048]
            for name in RATIOS:
                if ratios := [ratio for cell in of if (ratio := cell["ratio_to_plain"][name]) is not None]:
                    figures = {"mean_ratio": round(statistics.geometric_mean(ratios), 4), "worst_ratio": max(ratios)}
                    rows.append({"head_dim": head_dim, "pass": which, "name": name} | figures)
    return rows


def table(cells: list[dict[str, Any]]) -> str:
    """Milliseconds of plain heads and the ratio of each mode to them."""
    width = max(len(name) for name in RATIOS) + 1
    lines = ["  D      S  causal  pass      plain ms  " + "".join(f"{name:>{width}}" for name in RATIOS)]
    for cell in cells:
        ratios = ["-" if each is None else f"{each:.3f}" for each in map(cell["ratio_to_plain"].get, RATIOS)]
        lines.append(
            f"{cell['head_dim']:>3}  {cell['seq_len']:>5}  {cell['causal']!s:>6}  {cell['pass']:<8}  "
            f"{cell['plain']:>8.3f}  {''.join(f'{each:>{width}}' for each in ratios)}"
        )
    return "\n".join(lines)


def main(json_path: str | None = None, repeats: int = 15) -> None:
    """Measure, print, and write to `json_path` after every shape. Needs a CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "foreshock bench attention --modes needs a CUDA GPU, and this machine has none that PyTorch sees"
        )
    run(Stopwatch(repeats), None if json_path is None else Path(json_path))


def run(stopwatch: Stopwatch, file: Path | None, device: str = "cuda") -> None:
    """Every shape in turn."""
    began = time.monotonic()
    cells: list[dict[str, Any]] = []
    for shape in SHAPES:
        found = measure(shape, stopwatch, device)
        header, *lines = table(found).splitlines()
        print("\n".join(lines if cells else [header, *lines]), flush=True)
        cells += found
        if file is not None:
            result = {
                **machine.header(f"foreshock bench attention --modes --repeats {stopwatch.repeats} --json {file.name}"),
                "unit": "milliseconds, median; every head has the mode, every row is counted",
                "seconds": round(time.monotonic() - began),
                "summary": summary(cells),
                "cells": cells,
            }
            file.write_text(json.dumps(result, indent=1) + "\n")
    for row in summary(cells):
        print(
            f"D {row['head_dim']}, {row['pass']}, {row['name']}, from S = 2048 on: {row['mean_ratio']:.3f} of plain, "
            f"worst {row['worst_ratio']:.3f}"
        )
