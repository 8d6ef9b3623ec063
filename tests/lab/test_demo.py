"""The demo's parts, and all of it once on a tiny model with detectors that warn early."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.lab.eager_detectors import EagerDetectors

from foreshock.contract import wire
from foreshock.contract.slots import Slot, identity_row
from foreshock.lab import demo
from foreshock.lab.demo_show import NO_KEY_BIAS, ON_CPU, ON_GPU, Show
from foreshock.lab.recording.record import Record
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import DetectorConfig

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    steps=200,
    warmup_steps=10,
)
SHOW = Show(recipe=TINY, starts_from="It starts from a tiny model.", seed=7, numerics="paper")
EARLY = EagerDetectors(
    horizon_run_multiple=None,
    block_steps=25,
    window_steps=200,
    earliest_steps=0,
    persist_blocks=1,
    offset_level=0.01,
    score_level=0.01,
)


def record(offsets: list[float], score: float = 3.0) -> Record:
    filled = Record()
    layer = wire.Layer(layer=0, name="h.0", heads=(0,), kv_heads=1, head_dim=8, served_by="reference")
    filled.add(wire.Started(step=0, unix_seconds=0.0, layers=(layer,), policy="observe", numerics="kernel"))
    for number, offset in enumerate(offsets, start=1):
        words = np.tile(identity_row(), (1, 1))
        words[0, Slot.ROWS] = 2
        floats = words.view(np.float64)
        floats[0, Slot.SCORE_OFFSET_SUM], floats[0, Slot.ROW_MAX_ABS] = 2 * offset, score
        filled.add(
            wire.Sample(
                step=100 * number,
                since_step=100 * (number - 1),
                unix_seconds=0.0,
                states=wire.Array.of(words),
                loss=2.0 / number,
            )
        )
    return filled


def test_a_record_sums_up_offsets_by_step_the_largest_score_and_the_last_losses() -> None:
    summary = record([0.5, 1.5], score=7.0).summary()
    assert summary["offset_by_step"] == {"100": [0.5], "200": [1.5]}
    assert summary["largest_score"] == 7.0
    assert summary["final_loss"] == pytest.approx(1.5)
    assert summary["steps"] == 200


def test_a_loss_before_a_step_is_the_mean_of_the_five_hundred_steps_up_to_it_whatever_came_after() -> None:
    filled = record([0.0] * 9)  # a loss of 2 / n at step 100 n
    assert filled.loss_before(700) == pytest.approx(np.mean([2.0 / n for n in range(3, 8)]))
    assert filled.loss_before(900) == filled.final_loss
    assert np.isnan(filled.loss_before(99))
    assert np.isnan(Record().final_loss)


def test_samples_of_single_steps_become_one_point() -> None:
    filled = record([])
    words = np.tile(identity_row(), (1, 1))
    for step in range(1, 61):
        words[0, Slot.ROWS] = 1
        words.view(np.float64)[0, Slot.SCORE_OFFSET_SUM] = step
        filled.add(
            wire.Sample(step=step, since_step=step - 1, unix_seconds=0.0, states=wire.Array.of(words), loss=float(step))
        )
    filled.add(wire.Finished(step=60, unix_seconds=0.0, status="completed"))
    assert filled.steps == [25, 50, 60]
    assert [float(offset[0]) for offset in filled.offsets] == [13.0, 38.0, 55.5]
    assert filled.losses == [13.0, 38.0, 55.5]


def test_a_branch_shares_its_trunk_up_to_the_branching_step_and_no_further() -> None:
    trunk = record([0.5, 1.5, 2.5])
    branch = trunk.until(200)
    branch.steps.append(300)
    assert branch.steps == [100, 200, 300]
    assert trunk.steps == [100, 200, 300]
    assert branch.offsets[-1][0] == 1.5


def result(**changes: Any) -> dict[str, Any]:
    arm = {"steps": 9, "loss_where_all_are": 1.0, "largest_score": 2.0, "warnings": 0, "heads": [[0, 1]]}
    arms = {
        name: arm | {"offset_by_step": {"9": [float(place)]}} for place, name in enumerate(("untreated", "control"))
    }
    return {
        "first_warning": None,
        "first_warning_step": None,
        "switch_step": None,
        "planned_steps": 13,
        "mitigation": "exact_delta",
        "control": "control",
        "arms": arms,
    } | changes


@pytest.mark.parametrize("show", [ON_CPU, ON_GPU], ids=lambda show: show.recipe.name)
def test_every_training_of_the_demo_has_the_shipped_detectors_and_the_shipped_cure(show: Show) -> None:
    for arm in (show.untreated, show.rescued, show.control):
        with Training(TINY, arm, 5).agent as agent:
            assert agent.config.detectors == DetectorConfig()
    assert show.rescued.mitigation == AgentConfig.model_fields["mitigation"].default == "row_corrected"


def test_the_demo_of_a_cpu_says_which_numerics_are_not_those_of_a_gpu() -> None:
    assert ON_CPU.numerics == "paper"
    assert "as on no GPU" in ON_CPU.starts_from
    assert ON_CPU.control.model == {"key_bias": False}
    assert ON_CPU.control.numerics == "paper"
    assert ON_GPU.numerics == "kernel"


def test_a_demo_without_a_warning_says_so() -> None:
    told = result()
    told["arms"]["untreated"]["offset_by_step"] = {"4": [9.0], "9": [-2.5]}
    said = demo.comparison(told)
    assert "No head was warned about within 9 of 13 steps" in said
    assert "Layer 0 head 1 drifted furthest: its score offset is -2.50 nats, 3.50 from the same head of control" in said


def test_a_warned_control_is_not_hidden() -> None:
    loud = result()
    loud["arms"]["control"]["warnings"] = 2
    assert "control was warned about 2 times" in demo.comparison(loud)


def test_the_comparison_says_how_far_the_head_moved_after_the_switch_with_and_without_it() -> None:
    told = result(
        first_warning={"layer": 0, "head": 1, "signal": "offset", "cause": "rounding"},
        first_warning_step=4,
        switch_step=4,
    )
    ends = {"untreated": 9.0, "rescued": 2.5, "control": 0.25}
    for name, end in ends.items():
        arm = told["arms"].setdefault(name, dict(told["arms"]["control"]))
        early = {str(step): [2.0] for step in range(1, 5)}
        arm["offset_by_step"] = early | {str(step): [end] for step in range(5, 14)}
        arm["steps"] = 13
    said = demo.comparison(told)
    assert "baseline +9.00, control +0.25, rescued +2.50 nats" in said
    assert "switched to exact_delta at step 4, at +2.00" in said
    assert "In the 9 steps since then it moved by +7.00 in the baseline and by +0.50 in the rescued run." in said
    assert "time ran out" not in said
    assert "time ran out at step 13 of 20" in demo.comparison(told | {"planned_steps": 20})
    # each training is as quick as its core is free: they are compared where all of them have been
    told["arms"]["untreated"]["offset_by_step"]["900"] = [77.0]
    told["arms"]["untreated"]["steps"] = 900
    assert demo.comparison(told) == said


def test_a_demo_on_a_cpu_names_the_recorded_failures_and_one_on_a_gpu_does_not() -> None:
    warned = {"layer": 0, "head": 1, "signal": "offset", "cause": "rounding"}
    told = result(first_warning=warned, first_warning_step=4)
    assert demo.comparison(told).endswith("Recorded ones: foreshock demo")
    assert "foreshock demo" not in demo.comparison(told | {"on_gpu": True})


@pytest.mark.full
def test_a_demo_whose_time_runs_out_before_a_warning_says_so(tmp_path: Path) -> None:
    said = io.StringIO()
    told = demo.main(
        tmp_path / "report.json",
        seed=3,
        port=0,
        show=SHOW,
        seconds=0.0,
        console=Console(file=said, width=200),
    )
    assert told["first_warning"] is None
    assert "No head was warned about" in said.getvalue()


@pytest.mark.full
def test_the_whole_demo_warns_branches_compares_and_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "path", [*sys.path, str(Path(__file__).parents[2])]
    )  # where its workers find EagerDetectors
    said = io.StringIO()
    told = demo.main(
        tmp_path / "report.json",
        seed=6,  # three of its four heads are far beyond these thresholds, whatever a processor rounds
        port=0,
        show=replace(SHOW, numerics="kernel", without=NO_KEY_BIAS, without_is="the same without"),
        agent_settings={"detectors": EARLY},
        console=Console(file=said, width=200),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == told
    assert set(report["arms"]) == {"untreated", "no-key-bias", "rescued"}
    assert report["first_warning_step"] is not None
    assert {"layer", "head", "signal", "evidence"} <= report["first_warning"].keys()
    assert 0 < report["branch_step"] < report["first_warning_step"]
    untreated, rescued = (report["arms"][name]["offset_by_step"] for name in ("untreated", "rescued"))
    shared = [step for step in untreated if int(step) <= report["branch_step"]]
    assert [rescued[step] for step in shared] == [untreated[step] for step in shared]
    assert all(arm["steps"] == TINY.steps for arm in report["arms"].values())
    text = said.getvalue()
    assert "Live page: http://127.0.0.1:" in text
    assert "foreshock, step" not in capfd.readouterr().err, "the demo tells it, once"
    assert f"step {report['first_warning_step']:>5}  baseline" in text
