"""Harm, baselines and the score table, on runs whose fate is known because they were made up."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words, identity_row
from foreshock.lab.recording.trace import Steps, Trace, read_trace
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.baselines import BASELINES, Signal
from foreshock.lab.scoring.harm import first_harm
from foreshock.lab.scoring.incidents import Told
from foreshock.lab.scoring.intervals import poisson_upper_bound
from foreshock.lab.scoring.report import lab_score
from foreshock.lab.scoring.score import NOT_RECORDED, alarms, split, truth
from foreshock.lab.scoring.table import as_json, calibrated, row, table

HEADS = 4
STEPS = 6000


def steps(loss: Floats, grad_norm: Floats | None = None) -> Steps:
    norm = np.full(len(loss), 0.5) if grad_norm is None else grad_norm
    step = np.arange(1, len(loss) + 1)
    return Steps(step, loss, norm, np.ones(len(loss), dtype=np.int64))


def noisy(level: float, count: int = STEPS, seed: int = 0) -> Floats:
    return level + 0.02 * np.random.default_rng(seed).normal(size=count)


def test_a_run_is_harmed_from_the_first_of_three_blocks_in_a_row_above_its_control() -> None:
    control = noisy(2.0)
    loss = control.copy()
    loss[1000:1200] += 0.1  # two blocks alone are no harm
    loss[3000:] += 0.06
    harm = first_harm(steps(loss), steps(control))
    assert harm is not None
    assert (harm.step, harm.by, harm.against) == (3001, "loss", "control")
    assert first_harm(steps(control), steps(control)) is None


def test_an_excess_that_comes_back_is_harm_only_when_it_was_large() -> None:
    control = noisy(2.0)
    for excess, harmed in ((0.08, False), (0.3, True)):
        loss = control.copy()
        loss[1000:1600] += excess
        harm = first_harm(steps(loss), steps(control))
        assert (harm is not None) == harmed


def test_a_gradient_norm_that_doubles_is_harm() -> None:
    control = noisy(2.0)
    norm = np.full(STEPS, 0.5)
    norm[4000:] = 1.2
    harm = first_harm(steps(control, norm), steps(control))
    assert harm is not None
    assert (harm.step, harm.by) == (4001, "gradient norm")


def test_what_comes_after_the_end_of_the_control_is_judged_against_its_last_blocks() -> None:
    control = noisy(2.0)
    assert first_harm(steps(control), steps(control[:4000])) is None
    ends = control.copy()
    ends[5000:] += 0.12
    harm = first_harm(steps(ends), steps(control[:4000]))
    assert harm is not None
    assert (harm.step, harm.by, harm.against) == (5001, "loss", "control")
    assert first_harm(steps(control + 0.04 * (np.arange(STEPS) >= 5000)), steps(control[:4000])) is None  # within 5 %


def test_a_loss_that_is_not_finite_is_harm_at_once() -> None:
    loss = noisy(2.0)
    loss[1234] = math.nan
    harm = first_harm(steps(loss), steps(noisy(2.0)))
    assert harm is not None
    assert (harm.step, harm.by) == (1235, "non-finite")


def test_without_a_control_a_run_is_compared_with_its_own_past() -> None:
    falling = 2.0 + 3.0 * np.exp(-np.arange(STEPS) / 500) + noisy(0.0)
    assert first_harm(steps(falling)) is None
    falling[4500:] += 0.4
    harm = first_harm(steps(falling))
    assert harm is not None
    assert (harm.step, harm.against) == (4501, "own past")


def test_a_loss_that_was_never_recorded_is_no_harm() -> None:
    unknown = np.full(STEPS, math.nan)
    assert first_harm(steps(unknown, unknown), steps(noisy(2.0))) is None


@pytest.mark.parametrize(("count", "bound"), [(0, 2.996), (1, 4.744), (2, 6.296), (10, 16.962)])
def test_the_upper_bound_is_that_of_the_tables_of_the_poisson_distribution(count: int, bound: float) -> None:
    assert poisson_upper_bound(count) == pytest.approx(bound, abs=1e-3)


def test_a_signal_that_stays_beyond_its_threshold_alarms_again_and_one_that_hovers_does_not() -> None:
    signal = Signal(np.arange(100, 1100, 100), np.array([0, 2, 0, 2, 2, math.nan, 0, 0, 0, 3.0]))
    assert alarms(signal, 2.0, spacing_steps=300) == [200, 500, 1000]
    assert alarms(signal, 2.0, spacing_steps=500) == [200, 1000]
    assert alarms(signal, 9.0) == []


def words(offset: float, largest: float) -> Words:
    state = np.tile(identity_row(), (HEADS, 1))
    floats = state.view(np.float64)
    state[:, Slot.ROWS] = 1000
    floats[:, Slot.SCORE_OFFSET_SUM] = 500.0
    floats[:, Slot.ROW_MAX_ABS] = 12.0
    floats[1, Slot.SCORE_OFFSET_SUM], floats[1, Slot.ROW_MAX_ABS] = 1000 * offset, largest
    floats[:, Slot.DELTA_BIAS_SUM], floats[1, Slot.DELTA_BIAS_SUM] = 1e-6, 1e-4
    return state


def record(path: Path, *, fails: bool, split: str = "held-out", seed: int = 1, **header: Any) -> Path:
    """A run of two layers of two heads; a failing head doubles every 400 steps, and the loss leaves at 5000."""
    layers = tuple(
        wire.Layer(layer=layer, name=f"h.{layer}", heads=(0, 1), kv_heads=2, head_dim=8, served_by="reference")
        for layer in (0, 1)
    )
    head = {"recipe": "made-up", "arm": "untreated" if fails else "control", "seed": seed, "split": split}
    head |= {"truth": "rounding" if fails else "healthy", "nature": "natural"}
    loss = noisy(2.0, seed=seed)
    if fails:
        loss[5000:] += 0.2
    with TraceWriter(path, head | header) as writer:
        writer(wire.Started(step=0, unix_seconds=0.0, layers=layers, policy="observe", numerics="kernel"))
        for step in range(50, STEPS + 1, 50):
            drift = 0.4 * 2 ** (max(0, step - 1500) / 400) if fails else 0.4
            state = wire.Array.of(words(drift, 10 + drift))
            sample = wire.Sample(step=step, since_step=step - 50, unix_seconds=0.0, states=state, learning_rate=1e-3)
            writer(sample)
            writer.steps(step - 50, loss[step - 50 : step], np.full(50, 0.5))
            writer.probe(step, {"stable_rank": np.full(HEADS, 10.0 if step < 4000 or not fails else 5.0)})
    return path


def test_a_failure_is_scored_with_its_lead_its_cause_and_its_forecast(tmp_path: Path) -> None:
    failing = record(tmp_path / "failing.jsonl.gz", fails=True)
    control = record(tmp_path / "control.jsonl.gz", fails=False)
    report = tmp_path / "report.json"
    heard: list[Path] = []
    (failed, healthy), result = lab_score([failing, control], report=report, on_trace=heard.append)
    assert heard == [failing, control]
    assert failed.first_warning_step is not None
    assert 2000 < failed.first_warning_step < 4000
    assert (failed.layer, failed.head, failed.cause) == (0, 1, "rounding")
    assert (failed.harm_step, failed.harm_by, failed.harm_against) == (5001, "loss", "control")
    assert failed.dangerous_step is not None
    assert healthy.first_warning_step is None
    assert healthy.healthy
    ours = result["table"][0]
    assert (ours["monitor"], ours["kind"], ours["split"]) == ("foreshock", "shipped", "held-out")
    assert (ours["failures"], ours["warned"], ours["in_time"]) == (1, 1, 1)
    assert ours["median_lead_steps"] == 5001 - failed.first_warning_step
    assert (ours["false_alarms"], ours["healthy_steps"]) == (0, STEPS)
    assert ours["upper_bound_per_10k"] == pytest.approx(2.9957 / STEPS * 1e4, rel=1e-3)
    assert (ours["causes"], ours["causes_right"]) == (1, 1)
    written = json.loads(report.read_text())
    first = written["traces"][0]
    assert first["file"] == "failing.jsonl.gz"
    assert first["first_steps"]["foreshock"] == failed.first_warning_step
    assert first["first_steps"]["Spectral Alignment"] == NOT_RECORDED
    assert set(first["first_steps"]) >= {baseline.name for baseline in BASELINES}
    assert written["forecasts"]["held-out"]["decided"] == 1
    assert failed.failing_head == (0, 1)
    assert failed.told_in_time == Told("rounding", [(0, 1)])
    assert [(each.step, each.cause) for each in failed.incidents] == [(failed.first_warning_step, "rounding")]
    rows = {each["group"]: each for each in written["incidents"]}
    assert (rows["failed"]["named"], rows["failed"]["named_of"], rows["failed"]["causes_right"]) == (1, 1, 1)
    assert (rows["healthy"]["runs"], rows["healthy"]["incidents"], rows["healthy"]["quiet_runs"]) == (1, 0, 1)
    assert rows["healthy"]["at_most_per_500k"] == pytest.approx(2.9957 * 500_000 / STEPS, rel=1e-3)


def test_baselines_are_calibrated_on_the_healthy_runs_of_the_tuning_set_alone(tmp_path: Path) -> None:
    paths = [
        record(tmp_path / "a.jsonl.gz", fails=False, split="tuning"),
        record(tmp_path / "b.jsonl.gz", fails=False, seed=2),
        record(tmp_path / "c.jsonl.gz", fails=True, seed=2),
    ]
    scores, result = lab_score(paths)
    level = calibrated(scores, "largest score of the model")
    assert level is not None
    assert level == pytest.approx(12.0)
    rows = {(each.monitor, each.kind, each.split): each for each in table(scores)}
    assert rows["largest score of the model", "calibrated", "tuning"].false_alarms == 0
    held_out = rows["largest score of the model", "calibrated", "held-out"]
    assert (held_out.warned, held_out.false_alarms) == (1, 0)
    rank = rows["stable rank", "calibrated", "held-out"]
    assert rank.median_lead_steps == 5001 - 4000
    assert ("Spectral Alignment", "calibrated", "held-out") not in rows
    assert {"foreshock", "loss z-score", "stable rank"} <= set(result["curves"])
    leads = result["lead_at_our_false_alarms"]
    assert leads["stable rank"] == 5001 - 4000
    assert leads["foreshock"] >= rows["foreshock", "shipped", "held-out"].median_lead_steps


def test_runs_that_thresholds_were_changed_after_are_tuning_and_treated_ones_are_neither_healthy_nor_failures(
    tmp_path: Path,
) -> None:
    def seen(name: str, **header: Any) -> tuple[str, str]:
        trace = read_trace(record(tmp_path / f"{name}.jsonl.gz", fails=False, **header))
        return split(trace), truth(trace)

    assert seen("a", recipe="shared-values", seed=1) == ("tuning", "healthy")
    assert seen("b", recipe="shared-values", seed=2) == ("held-out", "healthy")
    assert seen("c", recipe="healthy-small-many-heads", seed=3) == ("tuning", "healthy")
    assert seen("d", recipe="shared-values", seed=2, arm="exact-delta") == ("held-out", "treated")


def test_a_lower_threshold_never_warns_later(tmp_path: Path) -> None:
    scores, _ = lab_score([record(tmp_path / "f.jsonl.gz", fails=True), record(tmp_path / "h.jsonl.gz", fails=False)])
    for monitor in ("foreshock", "largest score of the model", "W_Q norm", "gradient-norm z-score"):
        if monitor not in scores[0].signals:
            continue
        leads = [row(scores, monitor, threshold, "swept", "").median_lead_steps or 0.0 for threshold in (0.2, 1, 13)]
        assert leads == sorted(leads, reverse=True)


def test_a_z_score_sees_a_spike_and_does_not_let_it_hide_the_next() -> None:
    loss = noisy(2.0, 500)
    loss[[200, 210]] += 1.0
    made = Steps(np.arange(1, 501), loss, np.full(500, math.nan), np.ones(500, dtype=np.int64))
    found = {each.name: each for each in BASELINES}["loss z-score"]
    trace = read_trace(TRACES / "key-bias_fp32_batch32.jsonl.gz")
    signal = found.signal(type(trace)(trace.path, {}, trace.started, [], made, []))
    assert signal is not None
    assert set(signal.step[signal.value > 10].tolist()) == {201, 211}
    assert {each.name: each for each in BASELINES}["gradient-norm z-score"].signal(
        type(trace)(trace.path, {}, trace.started, [], made, [])
    ) is None


TRACES = Path(__file__).parents[2] / "lab" / "traces"


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 9.0, math.inf, math.nan]), min_size=12, max_size=60),
    st.integers(0, 2**31),
)
def test_the_loss_spikes_of_other_tools_equal_their_definition_step_by_step(drawn: list[float], seed: int) -> None:
    loss = np.concatenate((np.random.default_rng(seed).uniform(1, 3, 110), drawn))
    made = Steps(np.arange(1, len(loss) + 1), loss, np.full(len(loss), math.nan), np.ones(len(loss), dtype=np.int64))
    run = Trace(
        Path("made-up"),
        {},
        wire.Started(step=0, unix_seconds=0.0, layers=(), policy="observe", numerics="kernel"),
        [],
        made,
        [],
    )
    for name, window, in_a_row in (("Lightning", 10, 1), ("llm-foundry", 100, 5)):
        signal = {each.name: each for each in BASELINES}[f"loss spike of {name}"].signal(run)
        assert signal is not None
        expected = {}
        for last in range(window + in_a_row - 1, len(loss)):
            ratios = []
            for place in range(last - in_a_row + 1, last + 1):
                past = [x for x in loss[place - window : place] if math.isfinite(x)]
                ratios.append(loss[place] / (sum(past) / len(past)) if math.isfinite(loss[place]) else math.inf)
            expected[last + 1] = min(ratios)
        assert signal.step.tolist() == list(expected)
        np.testing.assert_allclose(signal.value, list(expected.values()), rtol=1e-9)


def test_a_picture_of_the_curves_is_drawn_and_refused_when_it_would_be_empty(tmp_path: Path) -> None:
    failing, healthy = record(tmp_path / "f.jsonl.gz", fails=True), record(tmp_path / "h.jsonl.gz", fails=False)
    picture = tmp_path / "curves.png"
    lab_score([failing, healthy], picture=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one healthy run"):
        lab_score([healthy], picture=picture)


def test_nan_in_every_field_is_a_run_without_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "nan.jsonl.gz"
    state = np.tile(identity_row(), (2, 1))
    state.view(np.float64)[:, list(Slot)[6:]] = math.nan
    layer = wire.Layer(layer=0, name="h.0", heads=(0, 1), kv_heads=2, head_dim=8, served_by="reference")
    with TraceWriter(path, {}) as writer:
        writer(wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel"))
        for step in range(50, 5001, 50):
            nothing = wire.Array.of(np.full(2, math.nan, dtype=np.float32))
            sample = wire.Sample(
                step=step, since_step=step - 50, unix_seconds=0.0, states=wire.Array.of(state), query_norm=nothing
            )
            writer(sample)
            writer.probe(step, {"stable_rank": np.full(2, math.nan)})
    (score,), result = lab_score([path])
    assert (score.first_warning_step, score.warnings, score.harm_step) == (None, 0, None)
    assert score.first_steps["largest score of the model"] == NOT_RECORDED
    json.dumps(as_json([score]), allow_nan=True)
    assert result["curves"] == {}
