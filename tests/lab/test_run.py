"""The laboratory's text, model and runs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from foreshock.contract import wire
from foreshock.contract.slots import Words
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.texts import Corpus, standard_library
from foreshock.lab.training.long_run import LongRun
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import FAST_CONTROL, Training
from foreshock.lab.training.variant import CONTROL, RESCUED, UNTREATED, Variant, find_variant

TINY = replace(
    find_recipe("key-bias-small"),
    model=ModelConfig(layers=2, heads=2, width=16, context=16),
    batch=4,
    sample_every_steps=5,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


Begin = Callable[[Variant, int], Training]


@pytest.fixture
def begin(corpus: Corpus) -> Iterator[Begin]:
    """Starts a tiny training of a variant and a seed; its agent is gone after the test."""
    begun: list[Training] = []

    def start(variant: Variant, seed: int) -> Training:
        begun.append(Training(TINY, variant, seed, corpus=corpus))
        return begun[-1]

    yield start
    for training in reversed(begun):
        training.agent.close("stopped")


def losses(training: Training, steps: int) -> list[float]:
    return [float(training.advance()) for _ in range(steps)]


def test_pytorchs_own_float32_attention_trains_the_control_as_ours_does(corpus: Corpus) -> None:
    """On a GPU by its memory-efficient kernel, here by the one for processors; rounding of float32 alone differs."""
    kept = Training(TINY, CONTROL, 3, corpus=corpus, **FAST_CONTROL)
    with kept.agent:
        fast = losses(kept, 40)
    ours = Training(TINY, CONTROL, 3, corpus=corpus, attention="kernels")
    ours._fast = False
    samples: list[wire.Event] = []
    ours.agent.subscribe(samples.append)
    with ours.agent:
        slow = losses(ours, 40)
    assert fast == pytest.approx(slow, rel=2e-5)
    weights = zip(kept.model.parameters(), ours.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-3, rtol=1e-2) for a, b in weights)
    assert any(isinstance(event, wire.Sample) and event.words() is not None for event in samples)


def test_one_seed_gives_one_run_and_another_seed_another(begin: Begin) -> None:
    first, again, other = (losses(begin(UNTREATED, seed), 6) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.full
def test_runs_of_one_process_that_share_a_compiled_graph_are_each_counted_by_themselves(corpus: Corpus) -> None:
    """As on a GPU (`Recipe.compiled`), but without code generation, so that every bit is that of the eager run."""

    def words(compiled: bool) -> list[list[Words]]:
        runs = [Training(TINY, UNTREATED, seed, corpus=corpus) for seed in (5, 6)]
        counted: list[list[Words]] = [[], []]
        for run, samples in zip(runs, counted, strict=True):
            run.agent.subscribe(partial(_keep, samples))
            if compiled:
                whole = torch.compile(run.model, backend="aot_eager", dynamic=False, fullgraph=True)
                run._whole = cast(nn.Module, whole)
        for _ in range(12):
            for run in runs:
                run.advance()
        for run in runs:
            run.agent.close("completed")
        return counted

    eager, compiled = words(False), words(True)
    assert len(eager[0]) > 2
    for one, other in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(eager[0], eager[1])


def _keep(samples: list[Words], event: wire.Event) -> None:
    if isinstance(event, wire.Sample) and (words := event.words()) is not None:
        samples.append(words)


def test_a_branch_is_identical_until_a_head_is_switched(begin: Begin) -> None:
    trunk = begin(UNTREATED, 3)
    losses(trunk, 10)
    checkpoint = trunk.checkpoint()
    branch, switched = (begin(RESCUED, 99) for _ in range(2))
    branch.restore(checkpoint)
    switched.restore(checkpoint)
    expected = losses(trunk, 10)
    assert losses(branch, 10) == expected
    switched.agent.set_mode([(0, 0), (0, 1), (1, 0), (1, 1)], "exact_delta", reason="test")
    assert losses(switched, 10) != expected
    assert branch.step == trunk.step == 20


def test_a_checkpoint_does_not_move_with_the_run(begin: Begin) -> None:
    trunk = begin(UNTREATED, 3)
    losses(trunk, 3)
    checkpoint = trunk.checkpoint()
    expected = losses(trunk, 4)
    again = begin(UNTREATED, 0)
    again.restore(checkpoint)
    assert losses(again, 4) == expected


def test_a_run_writes_a_trace_of_every_head_and_sample(tmp_path: Path) -> None:
    steps: list[int] = []
    variant, folder = find_variant("exact-delta"), tmp_path / "runs" / "one"
    run = LongRun(
        recipe=TINY, variant=variant, seed=5, folder=folder, steps=12, on_step=lambda step, loss: steps.append(step)
    )
    assert run.train() == 12
    trace = read_trace(run.trace)
    assert steps == list(range(1, 13))
    assert trace.header["recipe"] == "key-bias-small"
    assert trace.heads == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert trace.samples[-1].step == 12
    assert trace.started.labels["seed"] == "5"
    assert trace.started.labels["variant"] == "exact-delta"
    modes = trace.samples[-1].modes
    assert modes is not None
    assert modes.numpy().tolist() == [1, 1, 1, 1]
