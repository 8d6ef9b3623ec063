"""Recorded runs played through today's detectors, alone and into a service."""

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
from tests.lab.made_up import STEPS, record
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


def test_the_recorded_failure_is_warned_about_thousands_of_steps_ahead_and_its_control_is_quiet(tmp_path: Path) -> None:
    report = tmp_path / "scores.json"
    (failed, control, arrested), _ = lab_score([FAILS, CONTROL, ARRESTED], report=report)
    assert failed.first_warning_step is not None
    assert failed.first_warning_step <= 6500
    assert (failed.layer, failed.head) == (0, 0)  # the recording holds one offset for all heads of a layer
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


def test_a_drift_whose_harm_is_far_off_is_warned_about_on_demand_and_its_control_is_quiet() -> None:
    """One head drifts by 16 nats to a largest |score| of 46."""
    traces = [read_trace(TRACES / f"key-bias-small_{variant}_seed8.trace.xz") for variant in ("untreated", "control")]
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


SMALL = replace(
    find_recipe("key-bias-small"),
    learning_rate=0.004,
    steps=1500,
    model=ModelConfig(layers=2, heads=2, width=32, context=32),
)


def learn_biases_faster(training: Training) -> None:
    """Under the paper's rounding the key bias then drifts by many nats within a thousand steps."""
    [weights] = training.optimizer.param_groups
    biases = [weight for name, weight in training.model.named_parameters() if name.endswith("bias")]
    weights["params"] = [weight for name, weight in training.model.named_parameters() if not name.endswith("bias")]
    training.optimizer.add_param_group({"params": biases, "initial_lr": 32 * training.recipe.learning_rate})


def assert_replayed(training: Training, steps: int, path: Path, hurt: Callable[[int], None]) -> list[wire.Verdict]:
    """Train, record, replay: every verdict and every risk is the agent's, to the bit. The verdicts."""
    live: list[wire.Event] = []
    with TraceWriter(path, {}) as writer:
        recorder = Recorder(training, writer)

        def stepped(step: int, loss: SupportsFloat) -> None:
            recorder.step(loss)
            if step == steps:
                recorder.flush()
            hurt(step)

        training.agent.subscribe(live.append)
        train(training, steps, stepped)
    trace = read_trace(path)
    said = [event for event in live if isinstance(event, wire.Verdict)]
    assert [event for event in trace.events if isinstance(event, wire.Verdict)] == said
    assert verdicts(trace, training.agent.config.detectors) == said
    risks = [event.risk for event in live if isinstance(event, wire.Sample)]
    again = [e.risk for e in judged(trace, training.agent.config.detectors) if isinstance(e, wire.Sample)]
    assert again == risks
    return said


@pytest.mark.parametrize("variant", ["flash-untreated", pytest.param("untreated", marks=pytest.mark.full)])
def test_a_replay_says_what_the_agent_said_of_its_own_attention_and_of_our_kernels(
    variant: str, tmp_path: Path
) -> None:
    """Scores that grow past every level, come back, and end in weights that are not finite."""
    recipe = replace(SMALL, steps=400, warmup_steps=10)
    training = Training(recipe, find_variant(variant), 1, detectors=DetectorConfig(quiet_steps=60, block_steps=10))
    learn_biases_faster(training)
    weights = [layer.weight for name, layer in training.model.named_modules() if name.endswith("attn.c_attn")]

    def hurt(step: int) -> None:
        with torch.no_grad():
            if 100 <= step < 180 or 200 <= step < 280:
                weights[0].mul_(1.04 if step < 200 else 1 / 1.04)
            if step == 390:
                weights[1].fill_(math.nan)

    said = assert_replayed(training, 400, tmp_path / "run.jsonl.gz", hurt)
    assert {verdict.state for verdict in said} == {"raised", "updated", "cleared"}
    assert {verdict.signal for verdict in said} >= {"score", "level", "nonfinite"}
    assert any("weights" in verdict.sentence for verdict in said)


@pytest.mark.full
def test_a_replay_says_what_the_agent_said_of_a_drift_by_rounding(tmp_path: Path) -> None:
    training = Training(SMALL, find_variant("paper"), 2, detectors=DetectorConfig(horizon_windows=None))
    learn_biases_faster(training)
    said = assert_replayed(training, 1400, tmp_path / "run.jsonl.gz", lambda step: None)
    assert any(verdict.signal == "offset" for verdict in said)


def test_a_replay_reaches_the_service_as_a_run_with_its_warning(tmp_path: Path) -> None:
    said: list[wire.Event] = []
    with ServiceProcess(tmp_path) as service:
        url = service.url
        replay({"replayed": read_trace(FAILS)}, url=url, on_event=lambda run, event: said.append(event))
        assert isinstance(said[0], wire.Started)
        assert isinstance(said[-1], wire.Finished)
        listed = {each["run"]: each for each in httpx.get(f"{url}/v1/runs").json()["runs"]}
        assert listed["replayed"]["status"] == "completed"
        assert listed["replayed"]["last_step"] == 20_600
        assert listed["replayed"]["active_warnings"] >= 1
        assert listed["replayed"]["numerics"] == "recorded"


def test_a_replay_to_a_service_that_is_not_there_says_how_to_start_one() -> None:
    with pytest.raises(ValueError, match="start one: foreshock serve"):
        replay({"replayed": read_trace(FAILS)}, url="http://127.0.0.1:9")


def test_a_replay_at_a_pace_hands_each_event_on_when_its_step_has_come(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path / "made-up.jsonl.gz", fails=False))
    began, heard = time.monotonic(), dict[int, float]()
    due = {"played": trace}
    replay(due, steps_per_second=20_000.0, on_event=lambda _, event: heard.update({event.step: time.monotonic()}))
    assert list(heard) == list(range(0, STEPS + 1, 50))
    assert all(at - began >= step / 20_000 for step, at in heard.items())
