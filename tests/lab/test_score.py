"""Harm, baselines and the score table, on runs whose fate is known because they were made up."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.made_up import STEPS, record

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.baselines import BASELINES, Signal
from foreshock.lab.scoring.incidents import OpenIncident
from foreshock.lab.scoring.intervals import poisson_upper_bound
from foreshock.lab.scoring.score import NOT_RECORDED, alarms, split, truth
from foreshock.lab.scoring.table import as_json, lab_score


@pytest.mark.parametrize(("count", "bound"), [(0, 2.996), (1, 4.744), (2, 6.296), (10, 16.962)])
def test_the_upper_bound_is_that_of_the_tables_of_the_poisson_distribution(count: int, bound: float) -> None:
    assert poisson_upper_bound(count) == pytest.approx(bound, abs=1e-3)


def test_a_signal_that_stays_beyond_its_threshold_alarms_again_and_one_that_hovers_does_not() -> None:
    signal = Signal(np.arange(100, 1100, 100), np.array([0, 2, 0, 2, 2, math.nan, 0, 0, 0, 3.0]))
    assert alarms(signal, 2.0, spacing_steps=300) == [200, 500, 1000]
    assert alarms(signal, 2.0, spacing_steps=500) == [200, 1000]
    assert alarms(signal, 9.0) == []


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
    assert first["first_steps"]["W_Q norm"] == NOT_RECORDED
    assert set(first["first_steps"]) >= {baseline.name for baseline in BASELINES}
    assert written["forecasts"]["held-out"]["decided"] == 1
    assert failed.failing_head == (0, 1)
    assert failed.told_in_time == OpenIncident("rounding", [(0, 1)])
    assert [(each.step, each.cause) for each in failed.incidents] == [(failed.first_warning_step, "rounding")]
    rows = {each["group"]: each for each in written["incidents"]}
    assert (rows["failed"]["named"], rows["failed"]["named_of"], rows["failed"]["causes_right"]) == (1, 1, 1)
    assert (rows["healthy"]["runs"], rows["healthy"]["incidents"], rows["healthy"]["quiet_runs"]) == (1, 0, 1)
    assert rows["healthy"]["at_most_per_500k"] == pytest.approx(2.9957 * 500_000 / STEPS, rel=1e-3)


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
    (score,), result = lab_score([path])
    assert (score.first_warning_step, score.warnings, score.harm_step) == (None, 0, None)
    assert score.first_steps["largest score of the model"] == NOT_RECORDED
    json.dumps(as_json([score]), allow_nan=True)
    assert [each["truth"] for each in result["traces"]] == [score.truth]
