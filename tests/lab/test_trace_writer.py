"""What is written of a run is read back, to the digits that are kept."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from tests.lab.short_traces import sample, started

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row
from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.recording.trace_writer import TraceWriter


def counted(rows: int, offset: float, largest: float) -> "np.ndarray[Any, np.dtype[np.int64]]":
    words = np.tile(identity_row(), (2, 1))
    words[:, Slot.ROWS] = rows
    floats = words.view(np.float64)
    floats[:, Slot.SCORE_OFFSET_SUM] = rows * offset
    floats[:, Slot.ROW_MAX_ABS] = largest
    floats[1, Slot.DELTA_BIAS_SUM] = math.nan
    return words


def test_samples_are_read_back_to_the_bit_and_single_steps_to_the_digits_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    modes = wire.Array.of(np.zeros(2, dtype=np.int32))
    given = []
    with TraceWriter(path, {"recipe": "made-up", "seed": 3}) as writer:
        writer(started(2))
        for since, step, offset in ((4000, 4050, 1.0), (4050, 4100, 2.000049), (4100, 4200, 5.0)):
            words = counted(100, offset, 0.0300004 * (step - 4000))
            given.append(sample(step, since, words).model_copy(update={"modes": modes, "loss": 1 / 3}))
            writer(given[-1])
            writer.steps(since, [1.23456] * (step - since), [math.inf] * (step - since))
        writer(sample(4210, 4200, np.tile(identity_row(), (2, 1))))
    trace = read_trace(path)
    assert trace.header == {"foreshock_trace": 1, "recipe": "made-up", "seed": 3}
    assert trace.heads == [(3, 0), (3, 1)]
    timeless = [each.model_copy(update={"unix_seconds": 0.0}) for each in given]
    assert trace.samples[:-1] == timeless
    *_, empty = readings(trace)
    assert empty.rows.tolist() == [0.0, 0.0]
    assert np.isnan(empty.largest_score).all()
    assert empty.loss == math.inf
    assert trace.steps.step.tolist() == list(range(4001, 4201))
    assert set(trace.steps.loss.tolist()) == {1.23}
    assert set(trace.steps.grad_norm.tolist()) == {math.inf}
