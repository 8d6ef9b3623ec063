"""Reading and writing traces of recorded runs, and rejecting invalid ones."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.short_traces import FAILS, sample, started, write

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import SLOT_COUNT, Slot, identity_row
from foreshock.lab.recording.trace import read_lines, read_trace, readings
from foreshock.lab.recording.trace_writer import TraceWriter


def test_recorded_events_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(-(2**62), 2**62, (2, SLOT_COUNT))
    events: list[wire.Event] = [started(2), sample(10, 0, words), sample(20, 10, words)]
    lines = [{"foreshock_trace": 1}, *(event.model_dump(mode="json") for event in events)]
    trace = read_trace(write(tmp_path / "run.jsonl.gz", lines))
    assert [trace.started, *trace.events] == events
    assert trace.steps.step.tolist() == [10, 20]
    assert trace.steps.span.tolist() == [10, 10]


def header_and_start() -> list[Any]:
    return [{"foreshock_trace": 1}, started(1).model_dump(mode="json")]


def write_truncated(path: Path) -> None:
    path.write_bytes(FAILS.read_bytes()[:20_000])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: write(path, []), "holds no lines"),
    "truncated": (write_truncated, "is not a whole trace"),
    "not gzip": (lambda path: path.write_text("{}"), "is not a whole trace"),
    "foreign": (lambda path: write(path, [{"epoch": 1}]), "is no trace: its first line has the fields epoch"),
    "later version": (lambda path: write(path, [{"foreshock_trace": 2}]), "reads version 1"),
    "without a start": (lambda path: write(path, [{"foreshock_trace": 1}]), "not recorded from the start"),
    "with an unknown event": (
        lambda path: write(path, [{"foreshock_trace": 1}, {"kind": "x"}]),
        "is not a valid event",
    ),
    "without a sample, but with weight statistics of older recorders": (
        lambda path: write(path, [*header_and_start(), {"kind": "probe", "step": 5, "stable_rank": [9.5]}]),
        "holds no sample",
    ),
    "with a slot too long": (
        lambda path: write(
            path, [*header_and_start(), {"kind": "sample", "step": 5, "since_step": 0, "slots": {"rows": [1, 2]}}]
        ),
        "line 3: ValueError slot rows has values for 2 heads in a trace of 1",
    ),
    "with losses that lack a gradient norm": (
        lambda path: write(
            path, [*header_and_start(), {"kind": "steps", "since_step": 0, "loss": [1.0, 2.0], "grad_norm": [1]}]
        ),
        "as many losses as gradient norms",
    ),
    "with text for a number": (
        lambda path: write(
            path, [*header_and_start(), {"kind": "steps", "since_step": 0, "loss": ["x"], "grad_norm": [1]}]
        ),
        "line 3: ValueError could not convert",
    ),
    "list as a header": (lambda path: write(path, [[1, 2]]), "holds no lines"),
    "with a field missing": (
        lambda path: write(path, [*header_and_start(), {"kind": "sample", "since_step": 0}]),
        "line 3 is not a valid event: Field required",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_invalid_trace_is_rejected(fault: str, tmp_path: Path) -> None:
    make, sentence = BROKEN[fault]
    path = tmp_path / "broken.jsonl.gz"
    make(path)
    with pytest.raises(ValueError, match=sentence):
        read_trace(path)


def test_trace_with_decreasing_steps_is_rejected(tmp_path: Path) -> None:
    header, start, first, second = read_lines(FAILS)[:4]
    for lines in ([second, first], [first, first]):
        with pytest.raises(ValueError, match="goes backwards in its samples; give a trace of one run without restarts"):
            read_trace(write(tmp_path / "back.jsonl.gz", [header, start, *lines]))
    backwards = second | {"since_step": second["step"] + 100}
    with pytest.raises(ValueError, match=r"line 4 is not a valid event[\s\S]* since_step 300 is after step 200"):
        read_trace(write(tmp_path / "inside.jsonl.gz", [header, start, first, backwards]))


def test_statistics_missing_from_old_traces_read_as_nan() -> None:
    trace = read_trace(FAILS)
    words = trace.samples[50].words()
    assert words is not None
    for unknown in (catalog.read("head.score_offset_rms", words), catalog.read("head.delta_bias_z", words)):
        assert np.isnan(unknown).all()
    assert np.isnan(catalog.read("head.row_max_abs", words)).all()
    assert trace.samples[50].modes is None
    assert words[0, Slot.TIED_ROWS_BF16] / words[0, Slot.ROWS] == pytest.approx(0.0035, abs=0.01)


def counted(rows: int, offset: float, largest: float) -> "np.ndarray[Any, np.dtype[np.int64]]":
    words = np.tile(identity_row(), (2, 1))
    words[:, Slot.ROWS] = rows
    floats = words.view(np.float64)
    floats[:, Slot.SCORE_OFFSET_SUM] = rows * offset
    floats[:, Slot.ROW_MAX_ABS] = largest
    floats[1, Slot.DELTA_BIAS_SUM] = math.nan
    return words


def test_written_samples_are_read_back_exactly_and_losses_to_three_digits(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    modes = wire.Array.of(np.zeros(2, dtype=np.int32))
    written = []
    with TraceWriter(path, {"recipe": "made-up", "seed": 3}) as writer:
        writer(started(2))
        for since, step, offset in ((4000, 4050, 1.0), (4050, 4100, 2.000049), (4100, 4200, 5.0)):
            words = counted(100, offset, 0.0300004 * (step - 4000))
            written.append(sample(step, since, words).model_copy(update={"modes": modes, "loss": 1 / 3}))
            writer(written[-1])
            writer.steps(since, [1.23456] * (step - since), [math.inf] * (step - since))
        writer(sample(4210, 4200, np.tile(identity_row(), (2, 1))))
    trace = read_trace(path)
    assert trace.header == {"foreshock_trace": 1, "recipe": "made-up", "seed": 3}
    assert trace.heads == [(3, 0), (3, 1)]
    timeless = [each.model_copy(update={"unix_seconds": 0.0}) for each in written]
    assert trace.samples[:-1] == timeless
    *_, empty = readings(trace)
    assert empty.rows.tolist() == [0.0, 0.0]
    assert np.isnan(empty.largest_score).all()
    assert empty.loss == math.inf
    assert trace.steps.step.tolist() == list(range(4001, 4201))
    assert set(trace.steps.loss.tolist()) == {1.23}
    assert set(trace.steps.grad_norm.tolist()) == {math.inf}
