"""CPU time of the detectors per sample, for 80 layers of 64 heads on one core, from statistics to verdicts.

There are two synthetic runs of 10,000 steps with a sample every 10 steps: one with only healthy heads, and one with a
layer whose heads all drift, which adds the cost of verdicts and forecasts. Each run is repeated, and each sample counts
with its least time, because other programs can only add time. The result is the mean over samples; the slowest samples
are those that close a block.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words, identity_row
from foreshock.monitor.detect.detectors import Detectors
from foreshock.monitor.detect.readings import Readings, head_readings

LAYERS: Final = 80
HEADS: Final = 64
_ROWS: Final = 65_536
Course = list[tuple[int, Words]]


def course(*, drifting: bool, layers: int = LAYERS) -> Course:
    """Generate a run: pairs of a step and statistics (`Words`), 100 steps apart."""
    random, count = np.random.default_rng(0), layers * HEADS
    level = random.uniform(-8, 8, count)
    samples = []
    for step in range(100, 10_001, 100):
        words = np.tile(identity_row(), (count, 1))
        floats = words.view(np.float64)
        offset = level * (1 - np.exp(-step / 900)) + 0.05 * random.normal(size=count)
        if drifting:
            offset[:HEADS] += 2e-2 * max(0, step - 2000)
        words[:, Slot.ROWS] = _ROWS
        floats[:, Slot.ROW_MAX_ABS] = 12 + np.abs(offset) + random.normal(size=count)
        floats[:, Slot.SCORE_OFFSET_SUM] = offset * _ROWS
        floats[:, Slot.DELTA_BIAS_SUM] = 1e-4 * random.normal(size=count)
        if drifting and step > 2000:
            floats[:HEADS, Slot.DELTA_BIAS_SUM] += 3e-4
        samples.append((step, words))
    return samples


def judged(played: Course, every: int = 10) -> Iterator[tuple[float, list[wire.Verdict]]]:
    """Yield the CPU time of each sample in microseconds, and its verdicts; samples in between repeat the statistics."""
    heads = [(layer, head) for layer in range(len(played[0][1]) // HEADS) for head in range(HEADS)]
    detectors, modes = Detectors(heads), np.zeros(len(heads), dtype=np.int32)
    for end, words in played:
        for step in range(end - 100 + every, end + 1, every):
            began = time.thread_time()
            verdicts = detectors.update(
                Readings(step=step, since_step=step - every, modes=modes, **head_readings(words))
            )
            yield 1e6 * (time.thread_time() - began), verdicts


def main(report: Path | None = None, passes: int = 12) -> dict[str, Any]:
    """Measure both runs, print the results and write them as JSON. Use OMP_NUM_THREADS=1 on an idle core."""
    result: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "passes": passes, "cores": len(os.sched_getaffinity(0))}
    for name, drifting in (("healthy", False), ("a layer drifts", True)):
        played = course(drifting=drifting)
        least = np.min([[taken for taken, _ in judged(played)] for _ in range(passes)], axis=0)
        median, high, largest = np.percentile(least, [50, 99, 100]).tolist()
        result[name] = {"mean": float(least.mean()), "median": median, "99 %": high, "largest": largest}
        print(f"{name}, us a sample:", ", ".join(f"{key} {value:.0f}" for key, value in result[name].items()))
    if report is not None:
        report.write_text(json.dumps(result, indent=2) + "\n")
    return result
