"""What the detectors cost a sample: 80 layers of 64 heads on one core, words to verdicts, blocks that close included.

Two courses of 10,000 steps, sampled every 10: healthy heads, and one layer whose heads all drift (verdicts and
forecasts are worked out as well). The mean is the figure; the slowest samples are those that close a block.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words, identity_row
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.readings import Readings, head_readings

LAYERS: Final = 80
HEADS: Final = 64
STEPS: Final = 10_000
EVERY: Final = 10
_ROWS: Final = 65_536


def _course(*, drifting: bool) -> list[tuple[int, Words]]:
    """Steps and words of one course, a few samples apart in time; samples between repeat the last."""
    random = np.random.default_rng(0)
    count = LAYERS * HEADS
    level = random.uniform(-8, 8, count)
    samples = []
    for step in range(100, STEPS + 1, 100):
        words = np.tile(identity_row(), (count, 1))
        floats = words.view(np.float64)
        offset = level * (1 - np.exp(-step / 900)) + 0.05 * random.normal(size=count)
        if drifting:
            offset[:HEADS] += 2e-2 * max(0, step - 2000)  # its harm comes into sight
        words[:, Slot.ROWS] = _ROWS
        words[:, Slot.TIED_ROWS_BF16] = _ROWS // 50
        floats[:, Slot.SCORE_MAX] = floats[:, Slot.ROW_MAX_ABS] = 12 + np.abs(offset) + random.normal(size=count)
        floats[:, Slot.SCORE_OFFSET_SUM], floats[:, Slot.SCORE_OFFSET_SUMSQ] = offset * _ROWS, (offset**2 + 0.3) * _ROWS
        floats[:, Slot.DELTA_BIAS_SUM] = 1e-4 * random.normal(size=count)
        if drifting and step > 2000:
            floats[:HEADS, Slot.DELTA_BIAS_SUM] += 3e-4  # without it a drift is not told
        floats[:, Slot.DELTA_BIAS_ABS], floats[:, Slot.DELTA_BIAS_SUMSQ] = 1e-2, 1e-6
        samples.append((step, words))
    return samples


def judged(*, drifting: bool) -> Iterator[tuple[float, list[wire.Verdict]]]:
    """The microseconds that each sample of a course took, and what was told of it."""
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    detectors, modes = Detectors(heads), np.zeros(len(heads), dtype=np.int32)
    for start, words in _course(drifting=drifting):
        for step in range(start - 100 + EVERY, start + 1, EVERY):
            began = time.thread_time()
            seen = Readings(step=step, since_step=step - EVERY, modes=modes, **head_readings(words))
            told = detectors.update(seen)
            yield 1e6 * (time.thread_time() - began), told


def measure(*, drifting: bool) -> dict[str, float]:
    """Microseconds a sample: mean, median, 99th percentile and largest; and the verdicts of the course."""
    taken, told = zip(*judged(drifting=drifting), strict=True)
    spread = np.percentile(taken, [50, 99, 100])
    return {
        "mean_us": float(np.mean(taken)),
        "median_us": float(spread[0]),
        "p99_us": float(spread[1]),
        "largest_us": float(spread[2]),
        "verdicts": sum(map(len, told)),
    }


def main(report: Path | None = None) -> dict[str, Any]:
    """Measure both courses, print a table, and write JSON. Call it with OMP_NUM_THREADS=1 on a quiet core."""
    courses = {"healthy": measure(drifting=False), "one layer drifting": measure(drifting=True)}
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{LAYERS} x {HEADS} heads, us a sample")
    for name in ("course", "mean", "median", "p99", "largest", "verdicts"):
        table.add_column(name, justify="left" if name == "course" else "right")
    for name, seen in courses.items():
        table.add_row(name, *(f"{value:.0f}" for value in seen.values()))
    Console().print(table)
    result = {"layers": LAYERS, "heads": HEADS, "cores": len(os.sched_getaffinity(0)), "courses": courses}
    if report is not None:
        report.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
