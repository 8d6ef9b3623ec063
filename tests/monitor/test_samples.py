"""Samples: their schedule, their contents, and the asynchronous copy from the device."""

import itertools
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tqdm  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.hostile_server import acknowledge, hostile_server
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import tiny_gpt, train_step
from tests.monitor.watched_training import listening, train
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, Words, identity_row, merge_words, slot_values
from foreshock.monitor import attach, sampling
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.sampling import MAX_FLIGHTS, MAX_NOTES, Collector, Counted, SampleDraft, SamplingSchedule

DEFAULTS: dict[str, Any] = {
    "sample_every_steps": None,
    "norms_every_steps": 0,
}


def sampled_steps(monkeypatch: pytest.MonkeyPatch, step_seconds: list[float], **settings: Any) -> list[int]:
    """The steps at which samples end, for steps with these durations."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with listening(tiny_gpt(), **DEFAULTS | settings) as (agent, listener):
        for seconds in step_seconds:
            clock[0] += seconds
            agent.step(1.0)
    monkeypatch.undo()
    return [sample.step for sample in listener.of(wire.Sample)]


@pytest.mark.parametrize(
    ("seconds", "settings", "steps"),
    [
        ([0.5] * 35, {}, [1, 10, 20, 30, 35]),
        ([1e-3] * 7, {"sample_every_steps": 3}, [1, 3, 6, 7]),
        ([0.009] * 500, {}, [1, 160, 320, 480, 500]),  # 111 steps per second reach the time limit
        ([60.0] + [0.2] * 40, {}, [1, 10, 20, 30, 40, 41]),  # a long first step has no lasting effect
    ],
)
def test_samples_end_at_multiples_of_the_interval_within_the_time_limit(
    seconds: list[float], settings: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sampled_steps(monkeypatch, seconds, **settings) == steps


@pytest.mark.parametrize("skew", [1.0, 1.02, 0.98])
def test_ranks_with_different_clocks_sample_the_same_steps(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    jitter = itertools.cycle([0.9, 1.0, 1.2, 1.0, 0.9])
    one = [0.009 * next(jitter) for _ in range(700)]
    other = [seconds * skew for seconds in reversed(one)]
    first, second = sampled_steps(monkeypatch, one), sampled_steps(monkeypatch, other)
    assert first == second
    near_threshold = [1 / 160] * 700  # at this rate one rank may get half the stride of the other
    often, seldom = (sampled_steps(monkeypatch, [s * f for s in near_threshold]) for f in (1.001, 0.999))
    assert set(seldom) <= set(often)


def scheduled_samples(
    numbers: list[int | None], every: int = 10, watch_from: int | None = None
) -> list[tuple[int, int]]:
    """The samples (since_step, step) that a SamplingSchedule takes for these step numbers."""
    schedule = SamplingSchedule(every, close_watch_steps=AgentConfig.close_watch_steps)
    first = numbers[0]
    schedule.begin_at(since := max(first - 1, 0) if first is not None else 0)
    samples = []
    for number in numbers:
        schedule.step_done(number)
        if watch_from is not None and schedule.step == watch_from:
            schedule.watch_closely(schedule.step)
        if schedule.due(since, notes_full=False):
            samples.append((since, schedule.step))
            since = schedule.step
            schedule.sampled()
    return samples


@pytest.mark.promise("A31")
@given(st.integers(0, 10**6), st.lists(st.integers(0, 40), min_size=1, max_size=300), st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_each_multiple_of_the_interval_that_is_passed_is_sampled_once(start: int, gaps: list[int], every: int) -> None:
    numbers = list(itertools.accumulate(gaps, initial=start + 1))
    ends = [step for _, step in scheduled_samples([*numbers], every)]
    assert ends[0] == start + 1
    assert len(set(ends)) == len(ends)
    reached_multiples = {number // every for number in numbers} - {ends[0] // every}
    assert sorted(end // every for end in ends[1:]) == sorted(reached_multiples)
    shifted = [step for _, step in scheduled_samples([number + 7 * every for number in numbers], every)]
    assert shifted == [step + 7 * every for step in ends]  # independent of the first number


@pytest.mark.promise("A31")
@pytest.mark.parametrize(
    ("numbers", "samples"),
    [
        (list(range(3, 1603, 4)), 160),  # numbers of micro-batches, four per step
        (list(range(1, 801, 2)), 80),
        (list(range(9, 2000, 10)), 200),  # a loop that calls the agent every tenth step
        (list(range(400)), 40),
        ([n // 4 for n in range(1600)], 40),  # called for each of four micro-batches
        (list(range(100)) * 4, 40),  # each epoch starts at 0
        ([*range(1, 201), *range(101, 301)], 41),  # a training that rewinds itself
        ([None] * 400, 41),
        ([*range(1, 101), *[None] * 300], 41),
    ],
)
def test_sampling_continues_under_any_step_numbering(numbers: list[int | None], samples: int) -> None:
    found = scheduled_samples(numbers)
    assert len(found) == samples
    assert all(before[1] == after[0] < after[1] for before, after in itertools.pairwise(found))


def test_repeated_step_number_is_replaced_by_the_next_one_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [step for _, step in scheduled_samples([5] * (3 * MAX_NOTES + 1), every=1)] == [5, 6, 7, 8]
    (line,) = {record.message for record in caplog.records}
    assert "was given step 5 after step 5; counting continues from 6" in line


def test_sample_is_taken_before_the_buffer_of_losses_is_full() -> None:
    with listening(tiny_gpt(), **DEFAULTS | {"sample_every_steps": 1000}) as (agent, listener):
        for call in range(2 * MAX_NOTES - 100):  # two micro-batches per step
            agent.step(1.0, step=1 + call // 2)
    assert [s.step for s in listener.of(wire.Sample)] == [1, MAX_NOTES // 2 + 1, MAX_NOTES - 50]


def test_agent_time_is_averaged_over_the_steps_of_its_sample_only() -> None:
    schedule = SamplingSchedule(10)
    for taken, mean in ((3.0, 1.5), (0.5, 0.25)):
        schedule.agent_took(taken)
        schedule.step_done(None)
        schedule.step_done(None)
        assert schedule.seconds_per_step()[1] == mean
        schedule.sampled()


def test_norms_are_measured_every_norms_every_steps() -> None:
    model = tiny_gpt()
    with listening(model, norms_every_steps=3) as (agent, listener):
        train(agent, model, 8)
    assert [sample.step for sample in listener.of(wire.Sample) if sample.query_norm is not None] == [1, 4, 7]


def test_every_step_is_sampled_during_the_close_watch() -> None:
    numbers: list[int | None] = [*range(1, 1001)]
    ends = [step for _, step in scheduled_samples(numbers, every=7, watch_from=300)]
    last = 300 + AgentConfig.close_watch_steps
    assert last % 7
    assert [step for step in ends if 300 <= step <= last + 7] == [*range(300, last + 1), last + 7 - last % 7]


@pytest.mark.promise("A31")
@pytest.mark.parametrize(("first", "begun", "start"), [(101, None, 100), (1, None, 0), (0, None, 0), (601, 500, 500)])
def test_started_event_has_the_current_step_of_the_training(first: int, begun: int | None, start: int) -> None:
    with listening(tiny_gpt(), sample_every_steps=10) as (agent, listener):
        if begun is not None:
            agent.begin_at(begun)
        agent.set_mode([(0, 0)], "exact_delta", "a test")
        for step in range(first, first + 30):
            agent.step(1.0, step=step)
    assert [started.step for started in listener.of(wire.Started)] == [start]
    assert [switched.step for switched in listener.of(wire.Switched)] == [start]
    assert listener.of(wire.Sample)[0].since_step == start
    assert agent.current_step == first + 29


def test_table_of_step_1_starts_on_a_new_line_under_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt()
    with tqdm.tqdm(total=3, file=sys.stderr) as bar, attach(model, url=None, norms_every_steps=0) as agent:
        for step in range(3):
            train(agent, model, [step])
            bar.update()
            bar.refresh()
    lines = re.split(r"[\r\n]+", capsys.readouterr().err)
    assert "foreshock, from step 1 on:" in lines
    assert any(line.startswith("watched 2 of 2") for line in lines)


def test_layer_that_stops_counting_is_reported_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        for step, frozen in enumerate([False, False, True, True, False, True, False]):
            second: Any = model.blocks[1]
            second.core = (lambda q, k, v: v) if frozen else type(second).core.__get__(second)
            train(agent, model, [step])
    messages = [r.message for r in caplog.records if "counted nothing" in r.message]
    assert [t.split(" in ")[1].split(":")[0] for t in messages] == ["step 3", "step 6"]
    assert all("layer 1 (blocks.1)" in t for t in messages)


HEADS = 3
PLAIN = np.zeros(HEADS, dtype=np.int32)


def fresh_state() -> torch.Tensor:
    return torch.from_numpy(identity_row()).repeat(HEADS, 1)


def counted_rows(words: Words) -> list[int]:
    return [int(row) for row in words[:, Slot.ROWS]]


@given(counts=st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_each_count_is_in_exactly_one_sample(counts: list[int]) -> None:
    state = fresh_state()
    collector = Collector(state)
    samples = []
    for step, count in enumerate(counts, start=1):
        state[:, Slot.ROWS] += count
        assert collector.snapshot(step, PLAIN)
        samples += collector.landed()
    assert [counted_rows(sample.words) for sample in samples] == [[count] * HEADS for count in counts]
    assert [(sample.since_step, sample.step) for sample in samples] == [(n, n + 1) for n in range(len(counts))]
    assert counted_rows(merge_words([sample.words for sample in samples])) == [sum(counts)] * HEADS
    assert torch.equal(state, fresh_state())


def test_sample_contains_the_losses_of_its_steps_and_the_last_learning_rate() -> None:
    collector, overwritten = Collector(fresh_state()), torch.tensor(7.0)
    collector.since_step = 100
    collector.note(2.5, None, 1e-3)
    collector.note(torch.tensor([[math.nan]]), overwritten, None)
    overwritten.fill_(9.0)
    assert collector.snapshot(102, PLAIN, step_seconds=0.5, agent_seconds=0.001)
    collector.note(1.5, 3, 5e-4)
    assert collector.snapshot(103, PLAIN)
    first, second = collector.landed()
    assert (first.since_step, first.step, second.since_step) == (100, 102, 102)
    np.testing.assert_array_equal(first.losses, [2.5, math.nan])
    assert (first.grad_norms.tolist(), first.learning_rate, first.step_seconds) == ([7.0], 1e-3, 0.5)
    assert (second.losses.tolist(), second.grad_norms.tolist(), second.learning_rate) == ([1.5], [3.0], 5e-4)
    assert second.step_seconds is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("low", None, None), r"^loss is 'low'; give one number$"),
        ((None, torch.zeros(2), None), r"grad_norm has shape \[2\]; give one number, for example its mean"),
        ((1.0, None, [1e-3]), r"^learning_rate is \[0.001\]; give one number, as scheduler.get_last_lr\(\)\[0\]$"),
    ],
)
def test_non_scalar_loss_norm_or_rate_is_rejected_with_advice(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collector(fresh_state()).note(*numbers)


def test_counting_continues_while_too_many_copies_are_pending() -> None:
    state = fresh_state()
    collector = Collector(state)
    for step in range(1, MAX_FLIGHTS + 1):
        state[:, Slot.ROWS] += 1
        assert collector.snapshot(step, PLAIN)
    state[:, Slot.ROWS] += 5
    collector.note(0.25, None, None)
    assert not collector.snapshot(MAX_FLIGHTS + 1, PLAIN)
    assert collector.since_step == MAX_FLIGHTS
    assert len(collector.landed(wait=True)) == MAX_FLIGHTS
    state[:, Slot.ROWS] += 2
    assert collector.snapshot(MAX_FLIGHTS + 2, PLAIN)
    [sample] = collector.landed()
    assert (sample.since_step, counted_rows(sample.words)) == (MAX_FLIGHTS, [7] * HEADS)
    assert sample.losses.tolist() == [0.25]


def counted(losses: list[float], norms: list[float], *, steps: int, since: int = 40) -> Counted:
    collector = Collector(fresh_state())
    collector.since_step = since
    for place in range(max(len(losses), len(norms))):
        loss, norm = (values[place] if place < len(values) else None for values in (losses, norms))
        collector.note(loss, norm, None)
    assert collector.snapshot(since + steps, PLAIN)
    [found] = collector.landed()
    return found


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        ([2.0, 2.0, 2.0, math.nan, math.nan], [], 43),  # the loss of step 44 uses the weights of step 43
        ([2.0, 2.0, 2.0, math.inf, math.nan], [math.inf, 1.0, math.inf, 1.0, 1.0], 43),  # a GradScaler skipped 41, 43
        ([math.nan] * 5, [math.nan] * 5, 40),
        ([], [1.0, 1.0, math.nan, math.nan, math.nan], 43),
        ([2.0] * 5, [1.0, math.inf, 1.0, 1.0, 1.0], None),
        ([2.0] * 5, [], None),
        ([], [], None),
        ([2.0, math.nan], [], 41),  # the steps of these losses are unknown: step 42 at the earliest
        ([2.0] * 6 + [math.nan], [], 40),  # more losses than steps
    ],
)
def test_suspect_step_precedes_the_first_nonfinite_loss(
    losses: list[float], norms: list[float], expected: int | None
) -> None:
    assert counted(losses, norms, steps=5).suspect_step == expected


class FakeCudaTensor(Tensor):
    """A CPU tensor that pretends to be on the device `place`, as do results computed from it."""

    is_cuda = True
    place = torch.device("cuda:0")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = torch.tensor(self.tolist()).to(*args, **kwargs)
        return moved if "cpu" in args else moved.as_subclass(type(self))


class FakeSecondCudaTensor(FakeCudaTensor):
    place = torch.device("cuda:1")


class FakeDevices:
    """Fake devices whose copies run only when the test calls `run`; until then the host reads stale values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: dict[torch.device, list[Callable[[], object]]] = {}
        monkeypatch.setattr(sampling, "_copied", self.copy_later)
        monkeypatch.setattr(sampling, "_recorded", self.event)

    def copy_later(self, source: FakeCudaTensor) -> Tensor:
        now = torch.tensor(source.tolist(), dtype=source.dtype)
        host = torch.full_like(now, -7.0)
        self.queued.setdefault(source.device, []).append(lambda: host.copy_(now))
        return host

    def event(self, device: torch.device) -> Any:
        return SimpleNamespace(query=lambda: not self.queued.get(device), synchronize=lambda: self.run(device))

    def run(self, device: torch.device) -> None:
        for copy in self.queued.pop(device, []):
            copy()


def tensor_on(kind: type[FakeCudaTensor], value: float) -> Tensor:
    return torch.tensor(value).as_subclass(kind)


@pytest.mark.parametrize("first", [0, 1])
def test_sample_is_read_only_after_all_devices_have_copied(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters are on the host, as for a model that was moved after attach or has offloaded weights."""
    devices, collector = FakeDevices(monkeypatch), Collector(fresh_state())
    collector.note(tensor_on(FakeCudaTensor, 1.0), tensor_on(FakeSecondCudaTensor, 5.0), None)
    collector.note(tensor_on(FakeSecondCudaTensor, 2.0), 6.0, None)
    collector.note(3.0, torch.tensor(7.0, dtype=torch.bfloat16), None)
    collector.note(torch.tensor(4.0, dtype=torch.float64), torch.tensor(8.0, dtype=torch.float16), None)
    collector.snapshot(4, PLAIN)
    assert sorted(map(str, devices.queued)) == ["cuda:0", "cuda:1"]
    assert collector.landed() == []
    devices.run(torch.device("cuda", first))
    assert collector.landed() == []
    [sample] = collector.landed(wait=True)
    assert not devices.queued, "the collector waited for the other device"
    assert (sample.losses.tolist(), sample.grad_norms.tolist()) == ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0])


def draft(**changes: Any) -> SampleDraft:
    norm = np.array([1.5, math.nan, 2.5, math.inf], dtype=np.float32)
    words = np.arange(4 * SLOT_COUNT, dtype=np.int64).reshape(4, SLOT_COUNT) - 7
    given = counted([1.0, math.inf, 3.0], [0.5, math.nan], steps=3, since=2)
    norms = {"query_norm": norm, "key_norm": norm, "query_key_norm": norm}
    given = replace(given, words=words, modes=np.array([0, 1, 2, 0], dtype=np.int32), norms=norms)
    return SampleDraft(replace(given, **changes), np.array([0.0, 0.25, 1.0, 0.5]))


@pytest.mark.parametrize("norms", [True, False])
def test_message_built_without_validation_is_valid_and_exact(norms: bool) -> None:
    given = draft() if norms else draft(norms={})
    received = wire.Sample.model_validate_json(given.build().model_dump_json())
    words = received.words()
    assert words is not None
    np.testing.assert_array_equal(words, given.counted.words)
    assert received.modes == wire.Array.of(given.counted.modes)
    assert received.risk == wire.Array.of(np.array([0.0, 0.25, 1.0, 0.5], dtype=np.float32))
    for name in ("query_norm", "key_norm", "query_key_norm"):
        expected = wire.Array.of(given.counted.norms[name]) if norms else None
        assert getattr(received, name) == expected
    assert (received.loss, received.loss_nonfinite_steps) == (math.inf, 1)
    assert received.grad_norm is not None
    assert math.isnan(received.grad_norm)


@pytest.mark.promise("A15")
def test_sample_that_cannot_be_built_is_counted_and_other_events_are_sent(tmp_path: Path) -> None:
    with hostile_server(acknowledge) as server:
        with attach(tiny_gpt(), **EVERY_STEP | {"url": server.url}, spool_directory=tmp_path) as agent:
            agent.step(1.0)
            assert agent._outbox.sender is not None
            agent._outbox.sender.put(draft(modes=np.zeros(3, dtype=np.int32)))
            agent.step(2.0)
        assert [event["step"] for event in server.events("sample")] == [1, 2]
        assert server.events("finished")
        assert agent._outbox.sender.dropped == {"unbuilt": 1}


@pytest.mark.parametrize("numbers", [range(1, 41), range(3, 100, 4), range(1, 40, 2), range(1001, 1041)])
def test_sample_contains_rows_of_its_last_step_only(numbers: range) -> None:
    """Consecutive steps have batches of different lengths, so row counts identify the step."""
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with listening(model, attention="keep", probe_rows=10**6, sample_every_steps=10) as (agent, listener):
        for number in numbers:
            agent.step(train_step(model, optimizer, number, torch.randint(16, (2, number % 97 + 2))), step=number)
    whole = [s for s in listener.of(wire.Sample) if s.step < numbers[-1]]  # close samples the rest outside the schedule
    assert len(whole) >= 4
    for sample in whole:
        assert set(slot_values(sample.words(), Slot.ROWS)) == {2 * (sample.step % 97 + 2)}
