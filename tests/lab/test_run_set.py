"""A set of runs: every trace is made once, and a run that fails or is cut short spoils no other."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.sets import run_set as many
from foreshock.lab.sets.run_set import Entry, chosen, run_set
from foreshock.lab.texts.corpus import Corpus, standard_library
from foreshock.lab.training.arm import CONTROL, UNTREATED
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe

TINY = replace(
    find_recipe("key-bias-small"),
    name="tiny",
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    batch=4,
    steps=60,
    sample_every_steps=5,
)
RUN = Entry(recipe=TINY, arm=UNTREATED, seed=3)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def finish(run: many._Run) -> None:
    while run.turn():
        pass
    run.end("completed")


@pytest.mark.full
def test_a_set_is_made_by_processes_and_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    entries = [RUN, replace(RUN, arm=CONTROL)]
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
    entries = [RUN, replace(RUN, arm=CONTROL, seed=13), replace(RUN, seed=13)]
    assert chosen(entries, []) == entries
    assert chosen(entries, ["*_seed13"]) == entries[1:]
    assert chosen(entries, ["tiny_untreated_*"]) == [RUN, entries[2]]
    with pytest.raises(ValueError, match=r"no run of this set matches 'tiny'; .* such as tiny_untreated_seed3"):
        chosen(entries, ["*", "tiny"])


def test_a_run_that_fails_stops_no_other(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(TINY, name="broken", learning_rate=-1.0)
    entries = [Entry(recipe=broken, arm=UNTREATED, seed=0), RUN]
    monkeypatch.setattr(many, "text_of", lambda name: corpus)
    (tmp_path / "claims").mkdir()
    many._work(entries, tmp_path, 1, 1e12, None)
    assert [path.name for path in tmp_path.glob("*.jsonl.gz")] == ["tiny_untreated_seed3.jsonl.gz"]


def test_time_that_is_out_leaves_a_whole_trace_of_an_unfinished_run(tmp_path: Path, corpus: Corpus) -> None:
    run = many._Run(RUN, tmp_path, corpus)
    while run.training.step < 20:
        run.turn()
    run.end("unfinished")
    assert read_trace(tmp_path / "unfinished" / "tiny_untreated_seed3.jsonl.gz").samples[-1].step == 20
    assert not list(tmp_path.glob("*.jsonl.gz"))
