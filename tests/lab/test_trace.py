"""Recorded runs: read, written, refused, scored and replayed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.short_traces import FAILS, sample, started, write

from foreshock.contract import wire
from foreshock.contract.metrics import catalog
from foreshock.contract.slots import SLOT_COUNT, Slot
from foreshock.lab.recording.trace import read_lines, read_trace
from foreshock.lab.recording.trace_writer import TraceWriter


def test_a_sample_on_the_wire_is_read_to_the_bit(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(-(2**62), 2**62, (2, SLOT_COUNT))
    events: list[wire.Event] = [started(2), sample(10, 0, words), sample(20, 10, words)]
    lines = [{"foreshock_trace": 1}, *(event.model_dump(mode="json") for event in events)]
    trace = read_trace(write(tmp_path / "run.jsonl.gz", lines))
    assert [trace.started, *trace.events] == events
    assert trace.steps.step.tolist() == [10, 20]
    assert trace.steps.span.tolist() == [10, 10]


def begun() -> list[Any]:
    return [{"foreshock_trace": 1}, started(1).model_dump(mode="json")]


def truncated(path: Path) -> None:
    path.write_bytes(FAILS.read_bytes()[:20_000])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: write(path, []), "holds no lines"),
    "truncated": (truncated, "is not a whole trace"),
    "not gzip": (lambda path: path.write_text("{}"), "is not a whole trace"),
    "foreign": (lambda path: write(path, [{"epoch": 1}]), "is no trace: its first line has the fields epoch"),
    "of a later version": (lambda path: write(path, [{"foreshock_trace": 2}]), "reads version 1"),
    "without a start": (lambda path: write(path, [{"foreshock_trace": 1}]), "not recorded from the start"),
    "with an unknown event": (
        lambda path: write(path, [{"foreshock_trace": 1}, {"kind": "x"}]),
        "an event that is none",
    ),
    "without a sample": (
        lambda path: write(path, [{"foreshock_trace": 1}, started(1).model_dump(mode="json")]),
        "holds no sample",
    ),
    "with a slot too long": (
        lambda path: write(path, [*begun(), {"kind": "sample", "step": 5, "since_step": 0, "slots": {"rows": [1, 2]}}]),
        "line 3: ValueError slot rows speaks of 2 heads in a trace of 1",
    ),
    "with losses that lack a gradient norm": (
        lambda path: write(path, [*begun(), {"kind": "steps", "since_step": 0, "loss": [1.0, 2.0], "grad_norm": [1]}]),
        "as many losses as gradient norms",
    ),
    "with text for a number": (
        lambda path: write(path, [*begun(), {"kind": "steps", "since_step": 0, "loss": ["x"], "grad_norm": [1]}]),
        "line 3: ValueError could not convert",
    ),
    "that holds a list": (lambda path: write(path, [[1, 2]]), "holds no lines"),
    "with a field missing": (
        lambda path: write(path, [*begun(), {"kind": "sample", "since_step": 0}]),
        "line 3 holds an event that is none: Field required",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_trace_is_refused_with_a_sentence(what: str, tmp_path: Path) -> None:
    make, sentence = BROKEN[what]
    path = tmp_path / "broken.jsonl.gz"
    make(path)
    with pytest.raises(ValueError, match=sentence):
        read_trace(path)


def test_steps_that_go_backwards_are_refused(tmp_path: Path) -> None:
    header, start, first, second = read_lines(FAILS)[:4]
    with pytest.raises(ValueError, match="goes backwards in its samples; give a trace of one run without restarts"):
        read_trace(write(tmp_path / "back.jsonl.gz", [header, start, second, first]))
    backwards = second | {"since_step": second["step"] + 100}
    with pytest.raises(ValueError, match=r"line 4 holds an event[\s\S]* since_step 300 is after step 200"):
        read_trace(write(tmp_path / "inside.jsonl.gz", [header, start, first, backwards]))


def test_a_step_that_comes_twice_is_refused(tmp_path: Path) -> None:
    words = np.zeros((1, SLOT_COUNT), dtype=np.int64)
    path = tmp_path / "twice.jsonl.gz"
    with TraceWriter(path, {}) as writer:
        writer(started(1))
        writer(sample(10, 0, words))
        writer(sample(10, 0, words))
    with pytest.raises(ValueError, match="goes backwards"):
        read_trace(path)


def test_what_older_recorders_measured_of_weights_is_passed_over(tmp_path: Path) -> None:
    lines = [
        *begun(),
        {"kind": "probe", "step": 5, "stable_rank": [9.5]},
        {"kind": "sample", "step": 5, "since_step": 0},
    ]
    assert [each.step for each in read_trace(write(tmp_path / "probed.jsonl.gz", lines)).samples] == [5]


def test_what_the_old_traces_did_not_record_reads_nan_and_never_zero() -> None:
    trace = read_trace(FAILS)
    words = trace.samples[50].words()
    assert words is not None
    for unknown in (catalog.read("head.score_offset_rms", words), catalog.read("head.delta_bias_z", words)):
        assert np.isnan(unknown).all()
    assert np.isnan(catalog.read("head.row_max_abs", words)).all()
    assert trace.samples[50].modes is None
    assert words[0, Slot.TIED_ROWS_BF16] / words[0, Slot.ROWS] == pytest.approx(0.0035, abs=0.01)
