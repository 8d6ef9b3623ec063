"""Recorded runs replayed through the current detectors, offline and into a service."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import SupportsFloat

import httpx
import numpy as np
import pytest
import torch
from tests.lab.constructed_runs import STEPS, record
from tests.lab.short_traces import FAILS, TRACES

from foreshock.contract import wire
from foreshock.lab.recording.replay import judged, replay, verdicts
from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.score import lab_score, score_traces
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Recorder, Training, train
from foreshock.lab.training.variant import find_variant
from foreshock.monitor.detect.detectors import DetectorConfig
from foreshock.server.child import ServiceProcess

CONTROL = TRACES / "key-bias_fp32_batch32.trace.xz"
ARRESTED = TRACES / "key-bias_fa2_batch32_exact-delta-from-8000.trace.xz"


def test_recorded_failure_is_warned_about_early_and_its_control_is_not(tmp_path: Path) -> None:
    report = tmp_path / "scores.json"
    (failed, control, arrested), _ = lab_score([FAILS, CONTROL, ARRESTED], report=report)
    assert failed.first_warning_step is not None
    assert failed.first_warning_step <= 6500
    assert (failed.layer, failed.head) == (0, 0)  # the recording has one offset for all heads of a layer
    assert failed.dangerous_step == 9500
    assert failed.forecast_low_steps is not None
    assert failed.first_warning_step + failed.forecast_low_steps <= failed.dangerous_step
    assert (control.first_warning_step, control.warnings) == (None, 0)
    assert arrested.first_warning_step == failed.first_warning_step
    assert arrested.dangerous_step is None
    written = json.loads(report.read_text())["traces"]
    assert [each["first_warning_step"] for each in written] == [
        failed.first_warning_step,
        None,
        arrested.first_warning_step,
    ]


def test_slow_drift_is_warned_about_only_without_a_horizon() -> None:
    """One head drifts by 16 nats and reaches a |score| of only 46."""
    traces = [read_trace(TRACES / f"key-bias-small_{variant}_seed8.trace.xz") for variant in ("untreated", "control")]
    untreated, control = score_traces(traces, DetectorConfig(horizon_windows=None))
    assert untreated.first_warning_step is not None
    assert untreated.first_warning_step <= 5000
    assert untreated.cause == "rounding"
    *_, last = readings(traces[0])
    assert (untreated.layer, untreated.head) == traces[0].heads[int(np.argmax(np.abs(last.score_offset)))]
    assert control.warnings == 0
    assert [each.first_warning_step for each in score_traces(traces)] == [None, None]


def test_arrested_head_is_cleared_and_a_failing_head_is_not() -> None:
    cleared = [v for v in verdicts(read_trace(ARRESTED)) if v.state == "cleared"]
    assert {verdict.layer for verdict in cleared} == {0}
    assert min(verdict.step for verdict in cleared) > 8000
    failing = verdicts(read_trace(FAILS))
    assert [v for v in failing if v.state == "cleared"] == []
    assert failing[-1].severity == "critical"


SMALL = replace(
    find_recipe("key-bias-small"),
    learning_rate=0.004,
    steps=1500,
    model=ModelConfig(layers=2, heads=2, width=32, context=32),
)


def learn_biases_faster(training: Training) -> None:
    """Make the key bias drift by many nats within 1000 steps of the paper's rounding."""
    [weights] = training.optimizer.param_groups
    biases = [weight for name, weight in training.model.named_parameters() if name.endswith("bias")]
    weights["params"] = [weight for name, weight in training.model.named_parameters() if not name.endswith("bias")]
    training.optimizer.add_param_group({"params": biases, "initial_lr": 32 * training.recipe.learning_rate})


def assert_replay_matches(
    training: Training, steps: int, path: Path, disturb: Callable[[int], None]
) -> list[wire.Verdict]:
    """Train, record and replay: every verdict and risk equals the agent's bit for bit. Returns the verdicts."""
    agent_events: list[wire.Event] = []
    with TraceWriter(path, {}) as writer:
        recorder = Recorder(training, writer)

        def on_step(step: int, loss: SupportsFloat) -> None:
            recorder.step(loss)
            if step == steps:
                recorder.flush()
            disturb(step)

        training.agent.subscribe(agent_events.append)
        train(training, steps, on_step)
    trace = read_trace(path)
    verdicts_of_agent = [event for event in agent_events if isinstance(event, wire.Verdict)]
    assert [event for event in trace.events if isinstance(event, wire.Verdict)] == verdicts_of_agent
    assert verdicts(trace, training.agent.config.detectors) == verdicts_of_agent
    risks = [event.risk for event in agent_events if isinstance(event, wire.Sample)]
    again = [e.risk for e in judged(trace, training.agent.config.detectors) if isinstance(e, wire.Sample)]
    assert again == risks
    return verdicts_of_agent


@pytest.mark.parametrize("variant", ["flash-untreated", pytest.param("untreated", marks=pytest.mark.full)])
def test_replay_repeats_all_verdicts_of_the_agent(variant: str, tmp_path: Path) -> None:
    """Scores grow past every level and return; at the end, weights are set to NaN."""
    recipe = replace(SMALL, steps=400, warmup_steps=10)
    training = Training(recipe, find_variant(variant), 1, detectors=DetectorConfig(quiet_steps=60, block_steps=10))
    learn_biases_faster(training)
    weights = [layer.weight for name, layer in training.model.named_modules() if name.endswith("attn.c_attn")]

    def disturb(step: int) -> None:
        with torch.no_grad():
            if 100 <= step < 180 or 200 <= step < 280:
                weights[0].mul_(1.04 if step < 200 else 1 / 1.04)
            if step == 390:
                weights[1].fill_(math.nan)

    verdicts_of_agent = assert_replay_matches(training, 400, tmp_path / "run.jsonl.gz", disturb)
    assert {verdict.state for verdict in verdicts_of_agent} == {"raised", "updated", "cleared"}
    assert {verdict.signal for verdict in verdicts_of_agent} >= {"score", "level", "nonfinite"}
    assert any("weights" in verdict.sentence for verdict in verdicts_of_agent)


@pytest.mark.full
def test_replay_repeats_the_agents_verdicts_on_a_rounding_drift(tmp_path: Path) -> None:
    training = Training(SMALL, find_variant("paper"), 2, detectors=DetectorConfig(horizon_windows=None))
    learn_biases_faster(training)
    verdicts_of_agent = assert_replay_matches(training, 1400, tmp_path / "run.jsonl.gz", lambda step: None)
    assert any(verdict.signal == "offset" for verdict in verdicts_of_agent)


def test_replayed_run_and_its_warning_reach_the_service(tmp_path: Path) -> None:
    verdicts_of_agent: list[wire.Event] = []
    with ServiceProcess(tmp_path) as service:
        url = service.url
        replay({"replayed": read_trace(FAILS)}, url=url, on_event=lambda run, event: verdicts_of_agent.append(event))
        assert isinstance(verdicts_of_agent[0], wire.Started)
        assert isinstance(verdicts_of_agent[-1], wire.Finished)
        listed = {each["run"]: each for each in httpx.get(f"{url}/v1/runs").json()["runs"]}
        assert listed["replayed"]["status"] == "completed"
        assert listed["replayed"]["last_step"] == 20_600
        assert listed["replayed"]["active_warnings"] >= 1
        assert listed["replayed"]["numerics"] == "recorded"


def test_replay_without_a_service_explains_how_to_start_one() -> None:
    with pytest.raises(ValueError, match="start one: foreshock serve"):
        replay({"replayed": read_trace(FAILS)}, url="http://127.0.0.1:9")


def test_replay_at_a_given_speed_delivers_each_event_on_time(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path / "made-up.jsonl.gz", fails=False))
    began, times = time.monotonic(), dict[int, float]()
    due = {"played": trace}
    replay(due, steps_per_second=20_000.0, on_event=lambda _, event: times.update({event.step: time.monotonic()}))
    assert list(times) == list(range(0, STEPS + 1, 50))
    assert all(at - began >= step / 20_000 for step, at in times.items())
