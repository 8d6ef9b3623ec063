"""When samples are taken: at multiples of a number of steps, so that ranks sample the same steps without talking."""

import itertools
import re
import sys
import time
from typing import Any

import pytest
import torch
import tqdm  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import batch, tiny_gpt, train_step

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.sampler import SamplingSchedule
from foreshock.monitor.sampling.collector import MAX_NOTES


def sampled_steps(monkeypatch: pytest.MonkeyPatch, step_seconds: list[float], **settings: Any) -> list[int]:
    """The steps at which samples end, for steps that take so long."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with attach(tiny_gpt(), quiet=True, strict=True, url=None, norms_every_steps=0, **settings) as agent:
        listener = Listener()
        agent.subscribe(listener)
        for seconds in step_seconds:
            clock[0] += seconds
            agent.step(1.0)
    monkeypatch.undo()
    return [sample.step for sample in listener.of(wire.Sample)]


def test_slow_steps_are_sampled_at_multiples_of_the_steps_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_steps(monkeypatch, [0.5] * 35) == [1, 10, 20, 30, 35]
    assert sampled_steps(monkeypatch, [1e-3] * 7, sample_every_steps=3, sample_every_seconds=0.0) == [1, 3, 6, 7]


def test_quick_steps_are_sampled_no_more_often_than_the_seconds_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = sampled_steps(monkeypatch, [0.009] * 500)  # 111 steps a second
    assert steps == [1, 160, 320, 480, 500]


@pytest.mark.parametrize("skew", [1.0, 1.02, 0.98])
def test_ranks_whose_clocks_differ_sample_the_same_steps(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    jitter = itertools.cycle([0.9, 1.0, 1.2, 1.0, 0.9])
    one = [0.009 * next(jitter) for _ in range(700)]
    other = [seconds * skew for seconds in reversed(one)]
    first, second = sampled_steps(monkeypatch, one), sampled_steps(monkeypatch, other)
    assert first == second
    near_the_edge = [1 / 160] * 700  # where one rank may come to half the other's stride
    many, few = (sampled_steps(monkeypatch, [s * f for s in near_the_edge]) for f in (1.001, 0.999))
    assert set(few) <= set(many)


def test_a_long_first_step_does_not_slow_the_cadence_down_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_steps(monkeypatch, [60.0] + [0.2] * 40) == [1, 10, 20, 30, 40, 41]


def numbered(numbers: list[int | None], every: int = 10, watch_from: int | None = None) -> list[tuple[int, int]]:
    """The samples (since_step, step) of a training that numbers its steps so, as a schedule alone takes them."""
    schedule = SamplingSchedule(AgentConfig(sample_every_steps=every, sample_every_seconds=0.0, url=None))
    first = numbers[0]
    schedule.begin_at(since := max(first - 1, 0) if first is not None else 0)
    samples = []
    for number in numbers:
        schedule.step_done(number)
        if watch_from is not None and schedule.step == watch_from:
            schedule.watch_closely(schedule.step)
        if schedule.due(since, crowded=False):
            samples.append((since, schedule.step))
            since = schedule.step
            schedule.sampled()
    return samples


@pytest.mark.promise("A31")
@given(st.integers(0, 10**6), st.lists(st.integers(0, 40), min_size=1, max_size=300), st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_every_multiple_that_the_numbers_pass_is_sampled_once_whatever_numbers_they_are(
    start: int, gaps: list[int], every: int
) -> None:
    numbers = list(itertools.accumulate(gaps, initial=start + 1))
    ends = [step for _, step in numbered([*numbers], every)]
    assert ends[0] == start + 1
    assert len(set(ends)) == len(ends)
    passed = {number // every for number in numbers} - {ends[0] // every}
    assert sorted(end // every for end in ends[1:]) == sorted(passed)
    again = [step for _, step in numbered([number + 7 * every for number in numbers], every)]
    assert again == [step + 7 * every for step in ends]  # wherever they begin


@pytest.mark.promise("A31")
@pytest.mark.parametrize(
    ("numbers", "samples"),
    [
        (list(range(3, 1603, 4)), 160),  # the number of the micro-batch, where four make a step
        (list(range(1, 801, 2)), 80),
        (list(range(9, 2000, 10)), 200),  # a loop that calls the agent at every tenth step
        (list(range(400)), 40),
        ([n // 4 for n in range(1600)], 40),  # once for each of four micro-batches
        (list(range(100)) * 4, 40),  # anew in each epoch
        ([*range(1, 201), *range(101, 301)], 41),  # a training that goes back by itself
        ([None] * 400, 41),
        ([*range(1, 101), *[None] * 300], 41),
    ],
)
def test_no_numbering_of_the_steps_ends_the_sampling(numbers: list[int | None], samples: int) -> None:
    found = numbered(numbers)
    assert len(found) == samples
    assert all(before[1] == after[0] < after[1] for before, after in itertools.pairwise(found))


def test_a_number_that_never_changes_is_counted_on_before_its_notes_take_more_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [step for _, step in numbered([5] * (3 * MAX_NOTES + 1), every=1)] == [5, 6, 7, 8]
    (line,) = {record.message for record in caplog.records}
    assert "was given step 5 after step 5; its steps are counted on from 6" in line


def test_where_samples_are_rare_what_is_noted_of_the_steps_is_sampled_before_it_has_no_room() -> None:
    listener = Listener()
    with attach(tiny_gpt(), quiet=True, strict=True, url=None, norms_every_steps=0, sample_every_steps=1000) as agent:
        agent.subscribe(listener)
        for call in range(2 * MAX_NOTES - 100):  # two micro-batches a step
            agent.step(1.0, step=1 + call // 2)
    assert [s.step for s in listener.of(wire.Sample)] == [1, MAX_NOTES // 2 + 1, MAX_NOTES - 50]


def test_a_sample_holds_what_the_agent_took_of_its_own_steps_alone() -> None:
    schedule = SamplingSchedule(AgentConfig(url=None))
    for taken, mean in ((3.0, 1.5), (0.5, 0.25)):
        schedule.agent_took(taken)
        schedule.step_done(None)
        schedule.step_done(None)
        assert schedule.seconds_per_step()[1] == mean
        schedule.sampled()


def test_after_a_warning_every_step_is_sampled_to_the_last_of_the_close_watch() -> None:
    numbers: list[int | None] = [*range(1, 1001)]
    ends = [step for _, step in numbered(numbers, every=7, watch_from=300)]
    last = 300 + AgentConfig.close_watch_steps
    assert last % 7
    assert [step for step in ends if 300 <= step <= last + 7] == [*range(300, last + 1), last + 7 - last % 7]


@pytest.mark.promise("A31")
@pytest.mark.parametrize(("first", "begun", "start"), [(101, None, 100), (1, None, 0), (0, None, 0), (601, 500, 500)])
def test_the_start_of_a_run_bears_the_step_that_its_training_is_at(first: int, begun: int | None, start: int) -> None:
    listener = Listener()
    with attach(tiny_gpt(), quiet=True, strict=True, url=None, sample_every_seconds=0.0) as agent:
        if begun is not None:
            agent.begin_at(begun)
        agent.subscribe(listener)
        agent.set_mode([(0, 0)], "exact_delta", "a test")
        for step in range(first, first + 30):
            agent.step(1.0, step=step)
    assert [started.step for started in listener.of(wire.Started)] == [start]
    assert listener.of(wire.Sample)[0].since_step == start
    assert agent.current_step == first + 29


class ThroughData:
    """An optimizer that writes weights where PyTorch does not count it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad, alpha=-self.lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@pytest.mark.parametrize(
    ("every", "optimizer", "numbered", "warned"),
    [
        (4, torch.optim.SGD, False, True),
        (2, torch.optim.AdamW, False, True),
        (4, torch.optim.SGD, True, False),
        (1, torch.optim.AdamW, False, False),
        (4, ThroughData, False, False),
    ],
)
def test_an_agent_that_is_called_for_every_micro_batch_says_so_once(
    every: int, optimizer: Any, numbered: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    updates = optimizer(model.parameters(), lr=0.1)
    with attach(model, quiet=True, strict=True, url=None) as agent:
        for call in range(12 * every):
            loss = model(batch(call)).square().mean()
            loss.backward()
            if call % every == every - 1:
                updates.step()
                updates.zero_grad()
            agent.step(loss, step=call // every + 1 if numbered else None)
    said = [record.message for record in caplog.records if "every micro-batch" in record.message]
    assert len(said) == warned


def test_the_table_of_step_1_is_on_lines_of_its_own_under_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt()
    with tqdm.tqdm(total=3, file=sys.stderr) as bar, attach(model, url=None, norms_every_steps=0) as agent:
        for step in range(3):
            agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), step))
            bar.update()
            bar.refresh()
    lines = re.split(r"[\r\n]+", capsys.readouterr().err)
    assert "foreshock, from step 1 on:" in lines
    assert any(line.startswith("watched 2 of 2") for line in lines)
