"""Runs on PyTorch's own attention, forced to one kernel: kept, warned about, switched, captured again and tabled."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.typed import foreshock
from tests.lab.made_up import record
from tests.monitor.doubles import ScriptedDetectors, verdict
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from foreshock.contract import wire
from foreshock.lab.recording.trace_writer import TraceWriter
from foreshock.lab.scoring.run_table import run_rows
from foreshock.lab.sets.published_runs import published
from foreshock.lab.texts.corpus import Corpus, standard_library
from foreshock.lab.training import run as run_module
from foreshock.lab.training.arm import BACKENDS, RESCUED, UNTREATED, find_arm
from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.lab.training.real_text_split import assigned
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training, train
from foreshock.monitor import AgentConfig

CUDA = torch.cuda.is_available()
TINY = replace(
    find_recipe("kb256"),
    name="tiny",
    model=ModelConfig(layers=2, heads=2, width=32, context=16),
    batch=4,
    steps=40,
    warmup_steps=4,
    text="bytes",
)
HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


@pytest.fixture
def flash(corpus: Corpus) -> Iterator[Training]:
    """Warned about at step 10; its attention is PyTorch's flash kernel until then."""
    training = Training(TINY, find_arm("flash-rescued"), 3, corpus=corpus)
    training.agent.detectors = ScriptedDetectors(4, {10: [verdict(1, 0, step=10)]})
    yield training
    training.agent.close("stopped")


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_of_pytorch_has_a_watched_and_a_switched_run(backend: str) -> None:
    observed, switched = find_arm(f"{backend}-untreated"), find_arm(f"{backend}-rescued")
    assert (observed.policy, switched.policy) == (UNTREATED.policy, RESCUED.policy) == ("observe", "auto")
    assert {observed.backend, switched.backend} == {backend}
    assert (switched.mitigation, switched.switch_scope) == (RESCUED.mitigation, RESCUED.switch_scope)
    assert not observed.cured
    assert TINY.header(observed, 3, "r")["backend"] == backend
    assert "backend" not in TINY.header(UNTREATED, 3, "r")


def test_its_agent_has_the_default_settings_of_a_users_agent(flash: Training) -> None:
    own, default = flash.agent.config, AgentConfig(run="r")
    for name in ("attention", "numerics", "probe_rows", "sample_every_steps", "detectors"):
        assert getattr(own, name) == getattr(default, name), name
    assert "kept" in flash.agent.report()


@pytest.mark.skipif(CUDA, reason="a GPU has them")
@pytest.mark.parametrize("name", ["cudnn-untreated", "efficient-rescued"])
def test_a_kernel_that_a_cpu_has_not_is_refused_with_the_one_that_it_has(name: str, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"needs a CUDA GPU.*flash-(untreated|rescued) runs on both"):
        Training(TINY, find_arm(name), 3, corpus=corpus)


@pytest.mark.parametrize("name", ["flash-untreated", *(["cudnn-untreated", "efficient-untreated"] if CUDA else [])])
def test_the_attention_runs_under_the_forced_kernel_alone(
    name: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[SDPBackend, ...]] = set()
    own = GPT.forward

    def forward(*args: Any) -> torch.Tensor:
        seen.add(tuple(_cur_sdpa_kernel_backends()))
        return own(*args)

    monkeypatch.setattr(GPT, "forward", forward)
    training = Training(TINY, find_arm(name), 3, corpus=corpus)
    with training.agent:
        training.advance()
    assert seen == {(run_module._FORCED[find_arm(name).backend or "flash"],)}


def test_a_warning_moves_every_head_onto_our_kernels_and_a_captured_step_is_captured_again(flash: Training) -> None:
    heard: list[wire.Event] = []
    flash.agent.subscribe(heard.append)
    with flash.on_stream(), flash.agent:
        for _ in range(9):
            flash.advance()
        before = flash._graph
        if not CUDA:  # a graph that would go on with the attention it was captured with
            flash._graph = before = Replayed(flash)  # type: ignore[assignment]
        for _ in range(11):
            flash.advance()
        assert before is not None
        assert flash._graph is not before
        assert (flash._graph is not None) == CUDA
    [switched] = [event for event in heard if isinstance(event, wire.Switched)]
    assert (switched.outcome, sorted(switched.heads)) == ("applied", HEADS)
    assert 10 <= switched.step <= 14
    assert set(flash.agent.modes().values()) == {"row_corrected"}


class Replayed:
    """A captured step, on a machine without CUDA graphs."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def replay(self) -> None:
        self._training._loss, self._training._norm = self._training._compute()


def test_the_table_says_what_was_warned_about_whether_it_was_right_and_what_the_switch_did(
    tmp_path: Path, flash: Training
) -> None:
    header: dict[str, Any] = {"policy": "observe", "backend": "flash", "rows": 4096}
    observed = record(tmp_path / "observed.gz", fails=True, seed=3, **header | {"recipe": "tiny"})
    quiet = record(tmp_path / "quiet.gz", fails=False, seed=4, **header)
    switched = tmp_path / "switched.gz"
    with TraceWriter(switched, TINY.header(flash.arm, 3, "r")) as writer:
        train(flash, 20, writer=writer)
    first, one, two = run_rows([switched, observed, quiet])
    assert (first.recipe, first.seed, first.policy) == ("made-up", 4, "observe")
    assert (first.step_512, first.first_warning, first.head_right, first.switch_step) == (None,) * 4
    assert (one.recipe, one.policy, one.cause, one.rows) == ("tiny", "auto", "rounding", 4096)
    assert one.first_warning == 10
    assert one.switch_step is not None
    assert 10 <= one.switch_step <= 14
    assert one.head_right is False  # the head that reaches 512 in the observed run is 0/1
    assert (two.policy, two.head_right, two.score_end >= 512) == ("observe", None, True)
    assert two.step_512 == 5650
    assert two.loss_end == pytest.approx(2.2, abs=0.01)
    done = foreshock("lab", "run-table", str(switched), str(quiet), "--json", str(tmp_path / "v.json"))
    assert "first warning" in " ".join(done.output.split())
    assert [each["seed"] for each in json.loads((tmp_path / "v.json").read_text())["runs"]] == [4, 3]


def test_a_run_on_our_own_kernels_has_a_line_without_a_backend(tmp_path: Path) -> None:
    [ours] = run_rows([record(tmp_path / "ours.gz", fails=False)])
    assert (ours.backend, ours.rows, ours.first_warning) == (None, None, None)
    assert ours.offset_end < 3 < ours.score_end < 512


def test_the_set_is_what_the_notebook_plans_and_all_of_it_was_held_out_before() -> None:
    entries = published()["vendor"]
    assert len({entry.name for entry in entries}) == len(entries) == 43
    assert {assigned(entry.recipe.name, entry.seed) for entry in entries} == {"held-out"}
    assert [entry.name for entry in entries[:2]] == ["kb256_flash-untreated_seed21", "kb256_cudnn-untreated_seed21"]
