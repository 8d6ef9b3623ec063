"""What is written of a run is read back, to the digits that are kept."""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
from tests.lab.short_traces import sample, started

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row, slot_values
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


def test_what_is_written_is_read_back_to_four_digits_with_short_samples_merged(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    modes = wire.Array.of(np.zeros(2, dtype=np.int32))
    with TraceWriter(path, {"recipe": "made-up", "seed": 3}) as writer:
        writer(started(2))
        for since, step, offset in ((4000, 4050, 1.0), (4050, 4100, 2.000049), (4100, 4200, 5.0)):
            words = counted(100, offset, 0.0300004 * (step - 4000))
            words.view(np.float64)[:, Slot.SCORE_MAX] = [-1.0, 2.0]
            writer(sample(step, since, words).model_copy(update={"modes": modes}))
            writer.steps(since, [1.23456] * (step - since), [math.inf] * (step - since))
    trace = read_trace(path)
    assert trace.header == {"foreshock_trace": 1, "recipe": "made-up", "seed": 3}
    assert trace.heads == [(3, 0), (3, 1)]
    seen = list(readings(trace))
    assert [(each.since_step, each.step) for each in seen] == [(4000, 4100), (4100, 4200)]
    assert seen[0].rows.tolist() == [200, 200]
    np.testing.assert_allclose(seen[0].score_offset, 1.5, rtol=1e-4)
    np.testing.assert_allclose(seen[0].largest_score, 3.0, rtol=1e-4)
    recorded = trace.samples[0].words()
    assert recorded is not None
    assert slot_values(recorded, Slot.SCORE_MAX).tolist() == [-1.0, 2.0]
    np.testing.assert_array_equal(np.isnan(seen[0].delta_bias_sum), [False, True])
    assert trace.samples[0].modes == modes
    assert trace.steps.step.tolist() == list(range(4001, 4201))
    assert set(trace.steps.loss.tolist()) == {1.23}
    assert set(trace.steps.grad_norm.tolist()) == {math.inf}


def test_a_young_run_is_recorded_in_finer_samples_and_slots_that_are_the_same_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    with TraceWriter(path, {}) as writer:
        writer(started(2))
        for step in range(10, 201, 10):
            words = counted(100, 1.0, 7.0)
            words.view(np.float64)[:, Slot.SCORE_MAX] = 7.0
            writer(sample(step, step - 10, words))
    trace = read_trace(path)
    assert [each.step for each in trace.samples] == list(range(10, 201, 10))
    assert next(readings(trace)).largest_score.tolist() == [7.0, 7.0]
    with gzip.open(path, "rt") as file:
        assert '"score_max":"row_max_abs"' in file.read()


def test_heads_that_counted_no_row_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl.gz"
    with TraceWriter(path, {}) as writer:
        writer(started(2))
        writer(sample(10, 0, np.tile(identity_row(), (2, 1))))
    seen = next(readings(read_trace(path)))
    assert seen.rows.tolist() == [0.0, 0.0]
    assert np.isnan(seen.largest_score).all()
