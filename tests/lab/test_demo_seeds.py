"""Whether the demo keeps its promise on many seeds: how that is measured, on a tiny model."""

import io
import json
import os
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foreshock.cli.research import laboratory
from foreshock.lab.demo_show import ON_CPU, ON_GPU, Show
from foreshock.lab.sets import demo_seeds
from foreshock.lab.sets.demo_seeds import Shown
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import DetectorConfig

TINY = replace(
    find_recipe("key-bias-small"),
    name="tiny",
    model=ModelConfig(layers=1, heads=2, width=16, context=16),
    batch=2,
    steps=30,
    warmup_steps=10,
)
SHOW = Show(recipe=TINY, starts_from="It starts from a tiny model.", seed=7, numerics="paper")


def shown(**changes: Any) -> Shown:
    values: dict[str, Any] = {
        "recipe": "tiny",
        "numerics": "paper",
        "mitigation": "row_corrected",
        "control": "no-key-bias",
        "seed": 3,
        "processor": "own",
        "steps": 900,
        "warned_step": 400,
        "switched_step": 400,
        "layer": 0,
        "head": 1,
        "cause": "rounding",
        "offset_untreated": -40.0,
        "offset_switched": -5.0,
        "offset_control": 1.0,
        "score_untreated": 90.0,
        "score_switched": 20.0,
        "score_control": 15.0,
        "loss_untreated": 2.1,
        "loss_switched": 2.0,
        "loss_control": 2.0,
        "control_warnings": 0,
        "processor_seconds": 9.0,
    }
    return Shown(**(values | changes))


def test_the_promise_is_kept_by_a_warning_an_offset_that_was_undone_and_a_quiet_control() -> None:
    assert shown().kept


@pytest.mark.parametrize(
    "changes",
    [
        {"warned_step": None, "offset_switched": None},
        {"offset_switched": -39.0},
        {"offset_switched": 39.0},
        {"offset_switched": -80.0},
        {"control_warnings": 1},
        {"offset_switched": None},
    ],
)
def test_the_promise_is_broken_by_any_of_the_three_that_is_missing(changes: dict[str, Any]) -> None:
    assert not shown(**changes).kept


def test_a_seed_that_is_not_warned_about_is_measured_all_the_same_and_not_kept() -> None:
    measured = demo_seeds.measure(SHOW, 5)
    assert (measured.seed, measured.processor, measured.steps) == (5, "own", 30)
    assert measured.warned_step is None
    assert measured.offset_switched is None
    assert not measured.kept
    assert measured.loss_untreated > 0
    assert measured.loss_control > 0


@pytest.mark.parametrize("show", [ON_CPU, ON_GPU], ids=lambda show: show.recipe.name)
def test_every_training_of_the_demo_has_the_shipped_detectors_and_the_shipped_cure(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[AgentConfig] = []

    class Seen(Training):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            configs.append(self.agent.config)

    monkeypatch.setattr(demo_seeds, "Training", Seen)
    demo_seeds.measure(replace(show, recipe=TINY), 5)
    assert [config.detectors for config in configs] == [DetectorConfig()] * 2
    assert show.rescued.mitigation == AgentConfig.model_fields["mitigation"].default == "row_corrected"


def test_the_demo_of_a_cpu_says_which_numerics_are_not_those_of_a_gpu() -> None:
    assert ON_CPU.numerics == "paper"
    assert "as on no GPU" in ON_CPU.starts_from
    assert ON_CPU.control.model == {"key_bias": False}
    assert ON_CPU.control.numerics == "paper"
    assert ON_GPU.numerics == "kernel"


def test_a_file_of_another_version_of_the_demo_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    demo_seeds.write(file, [shown()])
    runs = json.loads(file.read_text())["runs"]
    del runs[0]["mitigation"]
    file.write_text(json.dumps({"runs": runs}))
    with pytest.raises(ValueError, match="of another version of the demo; name another file"):
        demo_seeds.demo_seeds(SHOW, [3], json_file=file)


def test_what_was_measured_is_kept_in_a_file_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "demo.json"
    demo_seeds.write(file, [shown(seed=seed, processor=kind) for seed in (4, 3) for kind in ("plain", "own")])
    assert [each["seed"] for each in json.loads(file.read_text())["runs"]] == [3, 4, 3, 4]
    monkeypatch.setattr(demo_seeds, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("a process was started"))
    found = demo_seeds.demo_seeds(SHOW, [3, 4], json_file=file)
    assert [(each.seed, each.processor) for each in found] == [(3, "own"), (4, "own"), (3, "plain"), (4, "plain")]


def test_an_unknown_kind_of_processor_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="no such kind of processor: abacus; allowed are own, plain"):
        demo_seeds.demo_seeds(SHOW, [1], processors=["abacus"])


def test_another_kind_of_processor_is_asked_for_by_its_variables_for_no_longer_than_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str | None] = []

    class Pool:
        def __init__(self, processes: int, mp_context: BaseContext) -> None:
            assert mp_context.get_start_method() == "spawn"

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, _: object, show: Show, seed: int, processor: str) -> Future[Shown]:
            seen.append(os.environ.get("ATEN_CPU_CAPABILITY"))
            done: Future[Shown] = Future()
            done.set_result(shown(seed=seed, processor=processor))
            return done

    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(demo_seeds, "ProcessPoolExecutor", Pool)
    file = tmp_path / "demo.json"
    demo_seeds.demo_seeds(SHOW, [8], json_file=file)
    assert seen == ["avx2", "default"]
    assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2"
    assert len(json.loads(file.read_text())["runs"]) == 2


def told(seeds: str, file: Path, recipe: str = "key-bias-small") -> str:
    said = io.StringIO()
    laboratory.demo_seeds(seeds, Console(file=said, width=200), recipe=recipe, processors=None, processes=1, json=file)
    return said.getvalue()


def test_the_command_tells_every_seed_and_on_how_many_the_promise_was_kept(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    runs = [shown(recipe="key-bias-small", seed=seed, processor=kind) for seed in (3, 4) for kind in ("own", "plain")]
    runs[3] = replace(runs[3], warned_step=None, switched_step=None, offset_switched=None, control_warnings=2)
    demo_seeds.write(file, runs)
    said = told("3-4", file)
    assert said.count("-40.0, -5.0, +1.0") == 3
    assert "-40.0, -, +1.0" in said
    assert "warned 2" in said
    three = "with a quiet control, 2 all three"
    assert f"processor own: of 2 seeds 2 warned about, 2 undone by the switch, 2 {three}" in said
    assert "processor plain: of 2 seeds 1 warned about, 1 undone by the switch, 1 with a quiet control, 1 all" in said


@pytest.mark.parametrize("seeds", ["", "x", "4-3", "1-", "-3", "1,2"])
def test_seeds_that_are_no_range_are_refused(seeds: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are no range; give the first and the last"):
        told(seeds, tmp_path / "demo.json")


def test_a_recipe_that_the_demo_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the demo has no recipe 'kb256'; allowed are key-bias-small, shared-values"):
        told("1", tmp_path / "demo.json", recipe="kb256")
