"""Failures and remedies: which cells there are, what each one trains, and what is kept."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.contract import wire
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.sets import matrix as sets
from foreshock.lab.sets.matrix import FAILURES, REMEDIES, Cell, Run, cells, matrix, measure, rows
from foreshock.lab.training.model import GPT, CausalSelfAttention, ModelConfig
from foreshock.lab.training.run import Training
from foreshock.monitor import Agent

TINY = ModelConfig(layers=1, heads=2, width=16, context=16, qkv_bias=False)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure, of a model that trains within a second."""
    small = {
        name: replace(each, recipe=replace(each.recipe, model=replace(TINY, float8=each.recipe.model.float8), batch=2))
        for name, each in FAILURES.items()
    }
    monkeypatch.setattr(sets, "FAILURES", small)


def run_of(cell: Cell, **other: Any) -> Run:
    made: dict[str, Any] = {
        "warned": None, "cause": None, "exploded": False, "final_loss": 2.0, "score_end": 20.0, "sentences": [],
        "learning_rate": 0.1, "steps": 4, "processor_seconds": 0.5,
    }  # fmt: skip
    return Run(**asdict(cell), **(made | other))


def test_all_cells_are_each_failure_with_nothing_with_each_remedy_at_both_times_and_in_float32() -> None:
    every = list(cells(FAILURES, (*REMEDIES, "float32"), ("start", "warning"), (1, 2)))
    assert len(every) == len(set(every)) == 2 * len(FAILURES) * (1 + 3 * 2 + 1)
    assert {cell.seed for cell in every[: len(every) // 2]} == {1}
    assert list(cells(["healthy"], ["qk_clip", "nothing"], ["warning"], [3])) == [
        Cell(failure="healthy", remedy="nothing", on=None, seed=3),
        Cell(failure="healthy", remedy="qk_clip", on="warning", seed=3),
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_name_that_is_unknown_is_refused_with_those_that_exist(which: int) -> None:
    given: list[Sequence[str]] = [["healthy"], ["nothing"], ["start"]]
    given[which] = ["prayer"]
    failures, remedies, ons = given
    with pytest.raises(ValueError, match=r"unknown .*: prayer; allowed are .*(healthy|nothing|start)"):
        list(cells(failures, remedies, ons, (1,)))


def test_a_cell_trains_the_same_twice_and_its_remedy_from_the_first_step_on() -> None:
    plain, again = (measure(Cell(failure="healthy", remedy="nothing", on=None, seed=1), steps=4) for _ in range(2))
    assert replace(plain, processor_seconds=0.0) == replace(again, processor_seconds=0.0)
    assert plain.exploded  # four steps teach nothing
    assert (plain.warned, plain.cause) == (None, None)
    modes: list[str] = []
    asked: list[str] = []
    made = Training.__init__

    def watched(self: Any, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings)
        modes.append(self.arm.mode)
        asked.append(settings["qk_clip"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "__init__", watched)
        for remedy in REMEDIES[1:]:
            measure(Cell(failure="healthy", remedy=remedy, on="start", seed=1), steps=2)
    assert modes == ["row_corrected", "plain", "row_corrected"]
    assert asked == ["never", "always", "always"]


@pytest.mark.parametrize("remedy", ["row_corrected", "qk_clip", "both", "nothing"])
def test_on_a_warning_the_remedy_comes_once_and_not_before(remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    listening: list[Any] = []
    verdict = wire.Verdict(
        id="w", step=3, state="raised", severity="warning", layer=0, head=0, cause="score growth", signal="score",
        sentence="Layer 0 head 0: its scores grow.",
    )  # fmt: skip
    advance = Training.advance

    def advanced(self: Any) -> torch.Tensor:
        if self.step == 0:
            monkeypatch.setattr(self.agent, "set_mode", lambda *_, **__: done.append(("mode", self.step)))
            monkeypatch.setattr(self.agent, "set_qk_clip", lambda *_, **__: done.append(("clip", self.step)))
        loss = advance(self)
        if self.step in (3, 5):
            for sink in listening:
                sink(verdict.model_copy(update={"step": self.step}))
        return loss

    monkeypatch.setattr(Training, "advance", advanced)
    subscribe = Agent.subscribe

    def subscribed(self: Agent, sink: Any) -> Any:
        listening.append(sink)
        return subscribe(self, sink)

    monkeypatch.setattr(Agent, "subscribe", subscribed)
    on = None if remedy == "nothing" else "warning"
    run = measure(Cell(failure="healthy", remedy=remedy, on=on, seed=1), steps=6)  # type: ignore[arg-type]
    expected = {"row_corrected": ["mode"], "qk_clip": ["clip"], "both": ["mode", "clip"], "nothing": []}[remedy]
    assert done == [(each, 3) for each in expected]
    assert (run.warned, run.cause) == (3, "score growth")


def test_text_that_changes_half_way_is_another_from_there_on() -> None:
    def seen(failure: str, steps: int) -> float | None:
        return measure(Cell(failure=failure, remedy="nothing", on=None, seed=1), steps=steps).final_loss

    assert seen("healthy", 6) != seen("changed text", 6)


def test_float8_rounds_queries_and_keys_and_lets_gradients_past() -> None:
    torch.manual_seed(0)
    plain, rounded = GPT(TINY), GPT(replace(TINY, float8=True))
    rounded.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 16)
    attentions = [model.get_submodule("h.0.attn") for model in (plain, rounded)]
    (true_query, true_key, true_value), (query, key, value) = (
        each.operands(x) for each in attentions if isinstance(each, CausalSelfAttention)
    )
    for true, given, exact in ((true_query, query, False), (true_key, key, False), (true_value, value, True)):
        assert torch.equal(true, given) == exact
        assert float((true - given).detach().abs().max()) <= float(true.detach().abs().max()) / 16
    tokens = torch.randint(256, (2, 17))
    norms = []
    for model in (plain, rounded):
        torch.autograd.backward(model(tokens[:, :-1], tokens[:, 1:]))
        gradient = model.get_submodule("h.0.attn").get_submodule("c_attn").get_parameter("weight").grad
        assert gradient is not None
        norms.append(float(gradient.norm()))
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


def test_what_is_kept_is_not_trained_again_and_float32_stands_apart(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    chosen = list(cells(["healthy", "fp8"], ["nothing", "float32"], [], (1,)))
    first = run_of(chosen[0], final_loss=1.25)
    file.write_text(json.dumps({"runs": [asdict(first)], "controls": []}))
    trained: list[Run] = []
    found = matrix(chosen[:1], json_file=file, on_run=trained.append)
    assert (found, trained) == ([first], [])
    controls = [run_of(cell) for cell in chosen if cell.remedy == "float32"]
    sets._write(file, {sets.cell_of(run): run for run in (first, *controls)})
    kept = json.loads(file.read_text())
    assert [Run(**run) for run in kept["runs"]] == [first]
    assert [Run(**run) for run in kept["controls"]] == controls


@pytest.mark.full
def test_when_the_time_is_over_no_training_begins_and_called_again_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    chosen = list(cells(["healthy"], ["nothing"], [], range(1, 6)))
    found = matrix(chosen, minutes=0.0, json_file=file, steps=2)
    assert 1 <= len(found) < len(chosen)
    assert json.loads(file.read_text())["runs"] == [asdict(run) for run in found]
    trained: list[Run] = []
    assert len(matrix(chosen, json_file=file, on_run=trained.append, steps=2)) == len(chosen)
    assert len(trained) == len(chosen) - len(found)


def test_the_table_counts_seeds_and_keeps_cells_that_are_not_finite() -> None:
    nothing = [Cell(failure="fp8", remedy="nothing", on=None, seed=seed) for seed in (1, 2, 3)]
    runs = [
        run_of(nothing[0], exploded=True, final_loss=None, warned=100, cause="score growth"),
        run_of(nothing[1], exploded=True, final_loss=None, warned=300, cause="other"),
        run_of(nothing[2], final_loss=2.0),
        run_of(Cell(failure="fp8", remedy="qk_clip", on="start", seed=1), final_loss=1.5),
    ]
    assert list(rows(runs)) == [
        ("fp8", "nothing", "", "2 of 3", "inf", "20", "2 of 3, step 200", "score growth 1, other 1"),
        ("fp8", "qk_clip", "start", "0 of 1", "1.50", "20", "0 of 1", ""),
    ]


def test_the_byte_before_tells_less_than_all_and_more_than_nothing() -> None:
    assert 1.5 < sets.entropy_given_last_byte() < math.log(256) - 2


def test_a_training_is_recorded_where_a_folder_is_named_and_comes_to_the_same(tmp_path: Path) -> None:
    cell = Cell(failure="rounding", remedy="both", on="warning", seed=2)
    alone, recorded = measure(cell, steps=130), measure(cell, steps=130, traces=tmp_path)
    assert replace(alone, processor_seconds=0.0) == replace(recorded, processor_seconds=0.0)
    [path] = tmp_path.iterdir()
    trace = read_trace(path)
    assert path.name == "rounding_both-warning_seed2.jsonl.gz"
    assert {name: trace.header[name] for name in asdict(cell)} == asdict(cell)
    assert trace.steps.step.tolist() == list(range(1, 131))
    assert float(trace.steps.loss[-100:].mean()) == pytest.approx(recorded.final_loss, rel=1e-3)
