"""What was counted leaves the device once, with the losses of its steps, and the state behind it is empty again."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.slots import Slot, Words, identity_row, merge_words
from foreshock.monitor.sampling.collector import MAX_FLIGHTS, MAX_NOTES, Collector, Counted

HEADS = 3
PLAIN = np.zeros(HEADS, dtype=np.int32)


def fresh_state() -> torch.Tensor:
    return torch.from_numpy(identity_row()).repeat(HEADS, 1)


def counted_rows(words: Words) -> list[int]:
    return [int(row) for row in words[:, Slot.ROWS]]


@given(counts=st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_each_count_is_in_exactly_one_sample_whatever_is_counted_between_them(counts: list[int]) -> None:
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


def test_a_sample_holds_the_losses_of_its_own_steps_and_the_last_learning_rate() -> None:
    collector = Collector(fresh_state())
    collector.since_step = 100
    collector.note(2.5, None, 1e-3)
    collector.note(torch.tensor([[math.nan]]), torch.tensor(7.0), None)
    assert collector.snapshot(102, PLAIN, step_seconds=0.5, agent_seconds=0.001)
    collector.note(1.5, 3, 5e-4)
    assert collector.snapshot(103, PLAIN)
    first, second = collector.landed()
    assert (first.since_step, first.step, second.since_step) == (100, 102, 102)
    np.testing.assert_array_equal(first.losses, [2.5, math.nan])
    assert (first.grad_norms.tolist(), first.learning_rate, first.step_seconds) == ([7.0], 1e-3, 0.5)
    assert (second.losses.tolist(), second.grad_norms.tolist(), second.learning_rate) == ([1.5], [3.0], 5e-4)
    assert second.step_seconds is None


def test_a_loss_that_the_training_overwrites_later_is_kept_as_it_was() -> None:
    loss = torch.tensor(4.0)
    collector = Collector(fresh_state())
    collector.note(loss, loss, None)
    loss.fill_(9.0)
    collector.snapshot(1, PLAIN)
    [sample] = collector.landed()
    assert (sample.losses.tolist(), sample.grad_norms.tolist()) == ([4.0], [4.0])


@pytest.mark.parametrize(
    ("loss", "norm", "named"), [(torch.zeros(2), None, "loss"), (None, torch.zeros(2), "grad_norm")]
)
def test_what_is_not_one_number_is_refused_by_its_name(loss: object, norm: object, named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named} has shape \[2\]; give one number, for example its mean"):
        Collector(fresh_state()).note(loss, norm, None)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (("low", None, None), r"^loss is 'low'; give one number$"),
        ((1.0, None, [1e-3]), r"^learning_rate is \[0.001\]; give one number, as scheduler.get_last_lr\(\)\[0\]$"),
    ],
)
def test_what_is_no_number_is_refused_with_what_it_is_and_what_to_give(numbers: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Collector(fresh_state()).note(*numbers)


def test_notes_without_a_sample_make_one_due() -> None:
    collector = Collector(fresh_state())
    for _ in range(MAX_NOTES - 1):
        collector.note(1.0, None, None)
    early = collector.crowded
    collector.note(1.0, None, None)
    due = collector.crowded
    collector.snapshot(MAX_NOTES, PLAIN)
    assert (early, due, collector.crowded) == (False, True, False)


def test_while_too_many_copies_are_under_way_counting_goes_on_and_nothing_is_lost() -> None:
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
        loss, norm = (told[place] if place < len(told) else None for told in (losses, norms))
        collector.note(loss, norm, None)
    assert collector.snapshot(since + steps, PLAIN)
    [found] = collector.landed()
    return found


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        ([2.0, 2.0, 2.0, math.nan, math.nan], [], 43),  # step 44 was computed with the weights of step 43
        ([2.0, 2.0, 2.0, math.inf, math.nan], [math.inf, 1.0, math.inf, 1.0, 1.0], 43),  # a GradScaler skipped 41, 43
        ([math.nan] * 5, [math.nan] * 5, 40),
        ([], [1.0, 1.0, math.nan, math.nan, math.nan], 43),
        ([2.0] * 5, [1.0, math.inf, 1.0, 1.0, 1.0], None),
        ([2.0] * 5, [], None),
        ([], [], None),
        ([2.0, math.nan], [], 41),  # which steps told no loss is not known: step 42 at the earliest
        ([2.0] * 6 + [math.nan], [], 40),  # more losses than steps
    ],
)
def test_the_first_step_that_may_have_broken_the_weights_lies_before_the_first_loss_that_shows_it(
    losses: list[float], norms: list[float], expected: int | None
) -> None:
    assert counted(losses, norms, steps=5).suspect_step == expected


def test_no_step_before_the_first_is_suspected() -> None:
    assert counted([math.nan, math.nan], [], steps=2, since=0).suspect_step == 1
