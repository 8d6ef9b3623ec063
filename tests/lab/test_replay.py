"""Recorded runs played through today's detectors, alone and into a service."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.lab.short_traces import FAILS, TRACES, write

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.lab.recording.replay import replay, verdicts
from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.score import score_traces
from foreshock.lab.scoring.table import lab_score
from foreshock.lab.service import local_service
from foreshock.lab.training.arm import find_arm
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training, train
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors

CONTROL = TRACES / "key-bias_fp32_batch32.trace.xz"
ARRESTED = TRACES / "key-bias_fa2_batch32_exact-delta-from-8000.trace.xz"


def test_the_recorded_failure_is_warned_about_thousands_of_steps_ahead_and_its_control_is_quiet(tmp_path: Path) -> None:
    report = tmp_path / "scores.json"
    (failed, control, arrested), _ = lab_score([FAILS, CONTROL, ARRESTED], report=report)
    assert failed.first_warning_step is not None
    assert failed.first_warning_step <= 6500
    assert (failed.layer, failed.head) == (0, 0)  # the recording holds one offset for all heads of a layer
    assert failed.dangerous_step == 9500
    assert failed.forecast_low_steps is not None
    assert failed.forecast_high_steps is None  # so early nobody can say until when
    assert [each.outcome for each in failed.forecasts if each.head == 0] == ["inside"]
    assert (control.first_warning_step, control.warnings) == (None, 0)
    assert arrested.first_warning_step == failed.first_warning_step
    assert arrested.dangerous_step is None
    written = json.loads(report.read_text())["traces"]
    assert [each["first_warning_step"] for each in written] == [
        failed.first_warning_step,
        None,
        arrested.first_warning_step,
    ]


def test_a_drift_whose_harm_is_far_off_is_warned_about_on_demand_and_its_control_is_quiet() -> None:
    """One head drifts by 16 nats to a largest |score| of 46."""
    traces = [read_trace(TRACES / f"key-bias-small_{arm}_seed8.trace.xz") for arm in ("untreated", "control")]
    untreated, control = score_traces(traces, DetectorConfig(horizon_windows=None))
    assert untreated.first_warning_step is not None
    assert untreated.first_warning_step <= 5000
    assert untreated.cause == "rounding"
    *_, last = readings(traces[0])
    assert (untreated.layer, untreated.head) == traces[0].heads[int(np.argmax(np.abs(last.score_offset)))]
    assert control.warnings == 0
    assert [each.first_warning_step for each in score_traces(traces)] == [None, None]


def test_an_arrested_head_is_cleared_after_quiet_steps_and_a_failing_one_never() -> None:
    cleared = [v for v in verdicts(read_trace(ARRESTED)) if v.state == "cleared"]
    assert {verdict.layer for verdict in cleared} == {0}
    assert min(verdict.step for verdict in cleared) > 8000
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


@pytest.mark.full
def test_a_replay_finds_each_head_as_near_a_warning_as_the_agent_did_that_sampled_it_more_often(tmp_path: Path) -> None:
    """Of a run that drifts by rounding within some hundred steps, whose recording holds blocks of its samples."""
    recipe, arm, path = find_recipe("fast-biases"), find_arm("paper"), tmp_path / "run.jsonl.gz"
    training = Training(replace(recipe, sample_every_steps=2), arm, 2)
    live: dict[int, Floats] = {}
    training.agent.subscribe(lambda event: live.update(_risk(event)))
    with TraceWriter(path, recipe.header(arm, 2, "run")) as writer:
        train(training, 1400, writer=writer)  # at 700 its bias supports a warning on some processors only
    trace, replayed = read_trace(path), Detectors([(0, 0), (0, 1), (1, 0), (1, 1)])
    assert 3 * len(trace.samples) < len(live)
    for sample, seen in zip(trace.samples, readings(trace), strict=True):
        replayed.update(seen)
        np.testing.assert_allclose(replayed.risk, live[sample.step], atol=0.02, err_msg=f"step {sample.step}")
    assert replayed.risk.max() > 0.5
    assert isinstance(training.agent.detectors, Detectors)
    assert np.abs(np.log(replayed.run.bias.capital)).max() > 1.0
    np.testing.assert_allclose(replayed.run.bias.capital, training.agent.detectors.run.bias.capital, rtol=0.05)


def _risk(event: wire.Event) -> dict[int, Floats]:
    return {event.step: event.risk.numpy()} if isinstance(event, wire.Sample) and event.risk is not None else {}


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
