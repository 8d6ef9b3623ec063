"""A set of runs: every trace is made once, a branch starts where its trunk was warned about."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreshock.contract import wire
from foreshock.contract.modes import DEFAULT_MITIGATION, parse_mode
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.training import run as run_module
from foreshock.lab.training import run_set as many
from foreshock.lab.training.arm import CONTROL, UNTREATED
from foreshock.lab.training.corpus import Corpus, standard_library
from foreshock.lab.training.milestones import Milestone
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run_set import Branch, Entry, chosen, run_set

TINY = replace(
    find_recipe("key-bias-small"),
    name="tiny",
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    batch=4,
    steps=60,
    sample_every_steps=5,
)
TRUNK = Entry(recipe=TINY, arm=UNTREATED, seed=3)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def finish(run: many._Run) -> None:
    while run.turn():
        pass
    run.end("completed")


@pytest.mark.full
def test_a_set_is_made_by_processes_and_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    entries = [TRUNK, replace(TRUNK, arm=CONTROL)]
    said: list[str] = []
    assert run_set(entries, tmp_path, processes=1, runs_per_process=2, say=said.append) == []
    assert said == [f"2 of 2 traces are in {tmp_path}"]
    traces = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl.gz")}
    assert set(traces) == {"tiny_untreated_seed3.jsonl.gz", "tiny_control_seed3.jsonl.gz"}
    assert run_set(entries, tmp_path, processes=1) == []
    assert traces == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl.gz")}
    trace = read_trace(tmp_path / "tiny_control_seed3.jsonl.gz")
    assert (trace.header["truth"], trace.header["nature"]) == ("healthy", "natural")
    assert trace.steps.step.tolist() == list(range(1, 61))


def test_runs_are_chosen_by_their_names_and_keep_their_order() -> None:
    late = replace(TRUNK, branch=Branch(name="late"))
    entries = [TRUNK, replace(TRUNK, arm=CONTROL, seed=13), late, replace(TRUNK, seed=13)]
    assert chosen(entries, []) == entries
    assert chosen(entries, ["*_seed13"]) == [entries[1], entries[3]]
    assert chosen(entries, ["tiny_late_*", "tiny_untreated_*"]) == [TRUNK, late, entries[3]]
    with pytest.raises(ValueError, match=r"no run of this set matches 'tiny'; .* such as tiny_untreated_seed3"):
        chosen(entries, ["*", "tiny"])


def test_a_branch_goes_on_from_its_trunk_after_the_warning_and_switches_what_it_says(
    tmp_path: Path, corpus: Corpus
) -> None:
    trunk = many._Run(TRUNK, tmp_path, corpus, [("warning", 10)])
    while trunk.training.step < 20:
        trunk.turn()
    trunk._hear(wire.Verdict(
        id="v", step=20, severity="warning", state="raised", signal="offset", cause="rounding", layer=1, head=0,
        sentence="A head drifts.",
    ))  # fmt: skip
    finish(trunk)
    branched = replace(TRUNK, branch=Branch(name="layer-late", delay_steps=10, heads="layer", remove_offset=True))
    finish(many._Run(branched, tmp_path, corpus, []))
    trace = read_trace(tmp_path / "tiny_layer-late_seed3.jsonl.gz")
    assert trace.steps.step.tolist() == list(range(31, 61))
    modes = trace.samples[-1].modes
    assert modes is not None
    flag = parse_mode(DEFAULT_MITIGATION)
    assert modes.numpy().tolist() == [0, 0, flag, flag]
    assert trace.header["arm"] == "layer-late"


def test_a_run_that_fails_stops_no_other(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(TINY, name="broken", learning_rate=-1.0)
    entries = [Entry(recipe=broken, arm=UNTREATED, seed=0), TRUNK]
    entries.append(replace(entries[0], branch=Branch(name="never")))
    monkeypatch.setattr(many, "text_of", lambda name: corpus)
    (tmp_path / "claims").mkdir()
    many._work(entries, tmp_path, 1, 1e12, None, True)
    assert [path.name for path in tmp_path.glob("*.jsonl.gz")] == ["tiny_untreated_seed3.jsonl.gz"]


def test_time_that_is_out_leaves_a_whole_trace_of_an_unfinished_run(tmp_path: Path, corpus: Corpus) -> None:
    run = many._Run(TRUNK, tmp_path, corpus, [])
    while run.training.step < 20:
        run.turn()
    run.end("unfinished")
    assert read_trace(tmp_path / "unfinished" / "tiny_untreated_seed3.jsonl.gz").samples[-1].step == 20
    assert not list(tmp_path.glob("*.jsonl.gz"))


def test_branches_wait_for_harm_and_explosion_and_take_no_place(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / "claims").mkdir()
    points: tuple[Milestone, ...] = ("harm", "explosion")
    after = [replace(TRUNK, branch=Branch(name=f"after-{point}", after=point, heads="all")) for point in points]
    entries = [TRUNK, *after, replace(TRUNK, seed=4)]
    assert many._next(entries, tmp_path, 0, 1) == TRUNK
    trunk = many._Run(TRUNK, tmp_path, corpus, [entry.branch.point for entry in after if entry.branch])
    assert many._next(entries, tmp_path, 1, 1) is None
    while trunk.training.step < 20:
        trunk.turn()
    trunk._milestones.passed["explosion"] = 20  # seen in its blocks, after a warning
    trunk.turn()
    assert many._next(entries, tmp_path, 1, 1) == after[1]
    assert many._next(entries, tmp_path, 3, 1) is None
    finish(trunk)
    finish(many._Run(after[1], tmp_path, corpus, []))
    header = read_trace(tmp_path / "tiny_after-explosion_seed3.jsonl.gz").header
    assert (header["when"], header["trunk"], header["arm"]) == ("explosion", "untreated", "after-explosion")


def test_a_run_hears_of_its_own_harm_by_its_blocks(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "HISTORY_STEPS", 10)
    monkeypatch.setattr(many, "HISTORY_STEPS", 10)
    run = many._Run(TRUNK, tmp_path, corpus, [("harm", 0)])
    run._hear(wire.Verdict(
        id="v", step=0, severity="warning", state="raised", signal="offset", cause="rounding", layer=1, head=1,
        sentence="A head drifts.",
    ))  # fmt: skip
    while run.training.step < 30:
        run.turn()
    with torch.no_grad():
        for parameter in run.training.model.parameters():
            parameter.mul_(8.0)
    finish(run)
    assert 40 <= run._milestones.passed["harm"] <= 60
    assert (tmp_path / "checkpoints" / "tiny_untreated_seed3_harm0.pt").exists()
