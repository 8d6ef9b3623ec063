"""Harm, baselines and the score table, on constructed runs with a known outcome."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.lab.constructed_runs import STEPS, noisy, record, steps
from tests.lab.short_traces import TRACES

from foreshock.contract import wire
from foreshock.contract.slots import MAX_SLOTS, SUM_SLOTS, Floats, identity_row
from foreshock.lab.recording.harm import first_harm
from foreshock.lab.recording.trace import Steps, read_trace
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.baselines import BASELINES, Signal, blocks_met
from foreshock.lab.scoring.score import alarms, lab_score


def test_alarms_repeat_after_the_spacing_while_a_signal_is_above_its_threshold() -> None:
    signal = Signal(np.arange(100, 1100, 100), np.array([0, 2, 0, 2, 2, math.nan, 0, 0, 0, 3.0]))
    assert alarms(signal, 2.0, spacing_steps=300) == [200, 500, 1000]
    assert alarms(signal, 2.0, spacing_steps=500) == [200, 1000]
    assert alarms(signal, 9.0) == []


def test_score_table_has_lead_cause_and_false_alarms_of_foreshock_and_baselines(tmp_path: Path) -> None:
    failing = record(tmp_path / "failing.jsonl.gz", fails=True)
    control = record(tmp_path / "control.jsonl.gz", fails=False)
    report = tmp_path / "report.json"
    (failed, healthy), result = lab_score([failing, control], report=report)
    assert failed.first_warning_step is not None
    assert 2000 < failed.first_warning_step < 4000
    assert (failed.layer, failed.head, failed.cause) == (0, 1, "rounding")
    assert failed.harm_step == 5001
    assert failed.dangerous_step is not None
    assert failed.failing_head == (0, 1)
    assert healthy.healthy
    assert healthy.first_warning_step is None
    rows = {row["monitor"]: row for row in result["table"]}
    foreshock_row = rows["foreshock"]
    assert set(rows) == {"foreshock", *(baseline.name for baseline in BASELINES)}
    assert (foreshock_row["warned"], foreshock_row["dangerous"], foreshock_row["in_time"], foreshock_row["harmed"]) == (
        1,
        1,
        1,
        1,
    )
    assert foreshock_row["median_lead"] == failed.dangerous_step - failed.first_warning_step
    assert (foreshock_row["healthy"], foreshock_row["healthy_warned"], foreshock_row["possible_alarms"]) == (
        1,
        0,
        math.ceil(STEPS / 2000),
    )
    leads = [rows[name]["median_lead"] for name in ("four conditions", "largest offset of the model")]
    assert foreshock_row["median_lead"] >= leads[0] > leads[1] > 0
    assert result["healthy"] == [
        {"set": tmp_path.name, "tuned": False, "runs": 1, "steps": STEPS, "warned": 0},
        {"set": "all", "tuned": None, "runs": 1, "steps": STEPS, "warned": 0},
    ]
    assert result["precision"] == {"warned_as_rounding": 1, "failed": 1, "cut_short": 0, "ran_to_the_end": 0}
    likely, lead = failed.forecast_steps, foreshock_row["median_lead"]
    assert likely is not None
    part = pytest.approx(lead / likely)
    assert result["forecasts"] == {"came": 1, "not_earlier": 1, "least_part": part, "most_part": part}
    written = json.loads(report.read_text())
    assert written["traces"][0]["trace"] == "failing"
    assert written["table"] == result["table"]


@pytest.mark.parametrize(("rate", "warns"), [(1e-4, True), (-1e-4, False), (0.0, False)])
def test_four_conditions_baseline_warns_only_of_heads_driven_by_their_bias(
    rate: float, warns: bool, tmp_path: Path
) -> None:
    trace = read_trace(record(tmp_path / "f.jsonl.gz", fails=True, bias=rate))
    *_, before_512 = (share for step, share in blocks_met(trace) if step < 5000)
    assert bool(before_512[1] == 1.0) is warns
    assert before_512[[0, 2, 3]].max() < 1.0


@pytest.mark.parametrize(("variant", "seen_as"), [("exact-delta", "treated"), ("untreated", "healthy")])
def test_run_treated_from_the_start_is_neither_healthy_nor_failing(variant: str, seen_as: str, tmp_path: Path) -> None:
    (score,), _ = lab_score([record(tmp_path / "run.jsonl.gz", fails=False, arm=variant)])
    assert (score.truth, score.healthy, score.failing) == (seen_as, seen_as == "healthy", False)


def test_run_with_nan_in_every_field_has_neither_warning_nor_harm(tmp_path: Path) -> None:
    path = tmp_path / "nan.jsonl.gz"
    state = np.tile(identity_row(), (2, 1))
    state.view(np.float64)[:, [*SUM_SLOTS, *MAX_SLOTS]] = math.nan
    layer = wire.Layer(layer=0, name="h.0", heads=(0, 1), kv_heads=2, head_dim=8, served_by="reference")
    with TraceWriter(path, {}) as writer:
        writer(wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel"))
        for step in range(50, 5001, 50):
            nan_norms = wire.Array.of(np.full(2, math.nan, dtype=np.float32))
            sample = wire.Sample(
                step=step, since_step=step - 50, unix_seconds=0.0, states=wire.Array.of(state), query_norm=nan_norms
            )
            writer(sample)
    (score,), result = lab_score([path])
    assert (score.first_warning_step, score.warnings, score.harm_step) == (None, 0, None)
    assert score.alarms["largest score of the model"] is None
    assert [each["truth"] for each in result["traces"]] == [score.truth]


def test_z_score_detects_spikes_after_an_earlier_spike() -> None:
    loss = noisy(2.0, 900)
    loss[[100, 600, 610]] += 1.0
    spiked_steps = Steps(np.arange(1, 901), loss, np.full(900, math.nan), np.ones(900, dtype=np.int64))
    found = {each.name: each for each in BASELINES}["loss z-score"]
    trace = read_trace(TRACES / "key-bias_fp32_batch32.trace.xz")
    signal = found.signal(type(trace)(trace.path, {}, trace.started, [], spiked_steps))
    assert signal is not None
    assert set(signal.step[signal.value > 10].tolist()) == {601, 611}
    assert {each.name: each for each in BASELINES}["gradient-norm z-score"].signal(
        type(trace)(trace.path, {}, trace.started, [], spiked_steps)
    ) is None


# Harm, on constructed losses and gradient norms


def changed(values: Floats, begin: int, end: int, excess: float) -> Floats:
    result = values.copy()
    result[begin:end] += excess
    return result


CONTROL, UNKNOWN, HALF = noisy(2.0), np.full(STEPS, math.nan), np.full(STEPS, 0.5)
FALLING = 2.0 + 3.0 * np.exp(-np.arange(STEPS) / 500) + noisy(0.0)
HARM: dict[str, tuple[Steps, Steps | None, int | None]] = {
    "stays above its control": (steps(changed(CONTROL, 3000, STEPS, 0.06)), steps(CONTROL), 3001),
    "is above it for two blocks": (steps(changed(CONTROL, 1000, 1200, 0.1)), steps(CONTROL), None),
    "returns": (steps(changed(CONTROL, 1000, 1600, 0.08)), steps(CONTROL), None),
    "returns from a large rise": (steps(changed(CONTROL, 1000, 1600, 0.3)), steps(CONTROL), 1001),
    "doubles its gradient norm": (steps(CONTROL, changed(HALF, 4000, STEPS, 0.7)), steps(CONTROL), 4001),
    "doubles its gradient norm after the control ends": (
        steps(CONTROL, changed(HALF, 4000, STEPS, 0.7)),
        steps(CONTROL[:4000]),
        None,
    ),
    "loss is not finite": (steps(changed(CONTROL, 1234, 1235, math.nan)), steps(CONTROL), 1235),
    "loss is not recorded": (steps(UNKNOWN, UNKNOWN), steps(CONTROL), None),
    "falls without a control": (steps(FALLING), None, None),
    "rises above its own past": (steps(changed(FALLING, 4500, STEPS, 0.4)), None, 4501),
}


@pytest.mark.parametrize("run", HARM)
def test_first_harm_is_a_lasting_or_large_rise_above_the_control_or_the_past(run: str) -> None:
    run_steps, control, harm = HARM[run]
    assert first_harm(run_steps, control) == harm
