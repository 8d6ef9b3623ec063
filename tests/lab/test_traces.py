"""Recorded runs: read, written, refused, scored and replayed."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.contract import catalog, wire
from foreshock.contract.slots import SLOT_COUNT, Slot, identity_row
from foreshock.lab.recording.replay import replay, verdicts
from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.report import lab_score
from foreshock.lab.service import local_service
from foreshock.monitor.detect.detectors import Detectors

TRACES = Path(__file__).parents[2] / "lab" / "traces"
FAILS = TRACES / "key-bias_fa2_batch32.jsonl.gz"
CONTROL = TRACES / "key-bias_fp32_batch32.jsonl.gz"
ARRESTED = TRACES / "key-bias_fa2_batch32_exact-delta-from-8000.jsonl.gz"


def write(path: Path, lines: list[Any]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def sample(step: int, since: int, words: "np.ndarray[Any, np.dtype[np.int64]]") -> wire.Sample:
    return wire.Sample(step=step, since_step=since, unix_seconds=1.0, states=wire.Array.of(words), loss=float("inf"))


def started(heads: int) -> wire.Started:
    layer = wire.Layer(layer=3, name="h.3", heads=tuple(range(heads)), kv_heads=1, head_dim=8, served_by="reference")
    return wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel")


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
        writer.probe(4200, {"stable_rank": np.array([1.23456, math.nan])})
    trace = read_trace(path)
    assert trace.header == {"foreshock_trace": 1, "recipe": "made-up", "seed": 3}
    assert trace.heads == [(3, 0), (3, 1)]
    seen = list(readings(trace))
    assert [(each.since_step, each.step) for each in seen] == [(4000, 4100), (4100, 4200)]
    assert seen[0].rows.tolist() == [200, 200]
    np.testing.assert_allclose(seen[0].score_offset, 1.5, rtol=1e-4)
    np.testing.assert_allclose(seen[0].row_max_abs, 3.0, rtol=1e-4)
    assert seen[0].score_max.tolist() == [-1.0, 2.0]
    np.testing.assert_array_equal(np.isnan(seen[0].delta_bias_sum), [False, True])
    assert trace.samples[0].modes == modes
    assert trace.steps.step.tolist() == list(range(4001, 4201))
    assert set(trace.steps.loss.tolist()) == {1.23}
    assert set(trace.steps.grad_norm.tolist()) == {math.inf}
    np.testing.assert_array_equal(trace.probes[0].values["stable_rank"], [1.235, math.nan])


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
    assert next(readings(trace)).score_max.tolist() == [7.0, 7.0]
    with gzip.open(path, "rt") as file:
        assert '"score_max":"row_max_abs"' in file.read()


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
    "with probes that go backwards": (
        lambda path: write(path, [*begun(), {"kind": "probe", "step": 9, "a": [1]}, {"kind": "probe", "step": 8}]),
        "goes backwards in its probes",
    ),
    "that holds a list": (lambda path: write(path, [[1, 2]]), "holds no lines"),
    "with a field missing": (
        lambda path: write(path, [{"it": 1, "cc": [1.0], "lg": [1.0], "sn": [[1.0]]}]),
        "line 1: KeyError",
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
    with gzip.open(FAILS, "rt") as file:
        lines = [json.loads(line) for line in file][:3]
    with pytest.raises(ValueError, match=r"line 3: ValidationError[\s\S]* since_step 300 is after step 200"):
        read_trace(write(tmp_path / "back.jsonl.gz", [lines[0], lines[2], lines[1]]))


def test_a_step_that_comes_twice_is_refused(tmp_path: Path) -> None:
    words = np.zeros((1, SLOT_COUNT), dtype=np.int64)
    path = tmp_path / "twice.jsonl.gz"
    with TraceWriter(path, {}) as writer:
        writer(started(1))
        writer(sample(10, 0, words))
        writer(sample(10, 0, words))
    with pytest.raises(ValueError, match="goes backwards"):
        read_trace(path)


def test_what_the_old_traces_did_not_record_reads_nan_and_never_zero() -> None:
    trace = read_trace(FAILS)
    words = trace.samples[50].words()
    assert words is not None
    for unknown in (catalog.read("head.score_offset_rms", words), catalog.read("head.delta_bias_z", words)):
        assert np.isnan(unknown).all()
    seen = list(readings(trace))[50]
    assert np.isnan(seen.row_max_abs).all()
    assert trace.samples[50].modes is None
    assert words[0, Slot.TIED_ROWS_BF16] / words[0, Slot.ROWS] == pytest.approx(0.0035, abs=0.01)


def test_the_recorded_failure_is_warned_about_thousands_of_steps_ahead_and_its_control_is_quiet(tmp_path: Path) -> None:
    report = tmp_path / "scores.json"
    (failed, control, arrested), _ = lab_score([FAILS, CONTROL, ARRESTED], report=report)
    assert failed.first_warning_step is not None
    assert failed.first_warning_step <= 5000
    assert (failed.layer, failed.head, failed.cause) == (0, 0, "rounding")
    assert failed.dangerous_step == 9500
    assert failed.forecast_low_steps is not None
    assert failed.forecast_high_steps is not None
    lead = failed.dangerous_step - failed.first_warning_step
    assert failed.forecast_low_steps <= lead <= failed.forecast_high_steps
    assert (control.first_warning_step, control.warnings) == (None, 0)
    assert arrested.first_warning_step == failed.first_warning_step
    assert arrested.dangerous_step is None
    written = json.loads(report.read_text())["traces"]
    assert [each["first_warning_step"] for each in written] == [
        failed.first_warning_step,
        None,
        arrested.first_warning_step,
    ]


def test_a_recorded_run_of_the_demo_is_warned_about_at_the_head_that_drifts_and_its_control_is_quiet() -> None:
    drifting = TRACES / "key-bias-small_untreated_seed8.jsonl.gz"
    (untreated, control), _ = lab_score([drifting, TRACES / "key-bias-small_control_seed8.jsonl.gz"])
    assert untreated.first_warning_step is not None
    assert untreated.first_warning_step <= 4500
    assert untreated.cause == "rounding"
    *_, last = readings(read_trace(drifting))
    assert (untreated.layer, untreated.head) == read_trace(drifting).heads[int(np.argmax(np.abs(last.score_offset)))]
    assert control.warnings == 0


def test_an_arrested_head_is_cleared_after_quiet_steps_and_a_failing_one_never() -> None:
    cleared = [v for v in verdicts(read_trace(ARRESTED)) if v.state == "cleared"]
    assert len(cleared) == 1
    assert cleared[0].step > 8000
    failing = verdicts(read_trace(FAILS))
    assert [v for v in failing if v.state == "cleared"] == []
    assert failing[-1].severity == "critical"


def test_a_replay_says_the_same_every_time() -> None:
    trace = read_trace(FAILS)
    assert verdicts(trace) == verdicts(trace)


def test_a_replay_says_what_the_detectors_said_live(tmp_path: Path) -> None:
    trace = read_trace(FAILS)
    live = Detectors(trace.heads)
    said = [verdict for reading in readings(trace) for verdict in live.update(reading)]
    recorded = [{"foreshock_trace": 1}, *(event.model_dump(mode="json") for event in (trace.started, *trace.events))]
    again = read_trace(write(tmp_path / "recorded.jsonl.gz", recorded))
    assert len(said) > 5
    assert verdicts(again) == said


def test_a_replay_reaches_the_service_as_a_run_with_its_warning(tmp_path: Path) -> None:
    said: list[wire.Event] = []
    with local_service(tmp_path, 0) as url:
        run = replay(FAILS, url=url, run="replayed", on_event=said.append)
        assert isinstance(said[0], wire.Started)
        assert isinstance(said[-1], wire.Finished)
        listed = {each["run"]: each for each in httpx.get(f"{url}/v1/runs").json()["runs"]}
        assert listed[run]["status"] == "completed"
        assert listed[run]["last_step"] == 20_600
        assert listed[run]["active_warnings"] >= 1
        assert listed[run]["numerics"] == "recorded"


def test_a_replay_to_a_service_that_is_not_there_says_how_to_start_one() -> None:
    with pytest.raises(ValueError, match="start one: foreshock serve"):
        replay(FAILS, url="http://127.0.0.1:9")


def test_heads_that_counted_no_row_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl.gz"
    with TraceWriter(path, {}) as writer:
        writer(started(2))
        writer(sample(10, 0, np.tile(identity_row(), (2, 1))))
    seen = next(readings(read_trace(path)))
    assert seen.rows.tolist() == [0.0, 0.0]
    assert np.isnan(seen.row_max_abs).all()
