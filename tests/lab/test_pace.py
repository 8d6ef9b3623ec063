"""Steps go by at the pace that somebody asked for last, whoever waits for them."""

from math import inf
from threading import Thread

import pytest

from foreshock.lab.recording.pace import Pace


class Clock:
    """Time that goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def steps(pace: Pace) -> int:
    """The last step that has come."""
    return max(step for step in range(2000) if pace.due(step))


def test_without_a_speed_every_step_has_come_at_once(clock: Clock) -> None:
    pace = Pace(clock=clock)
    assert pace.steps_per_second == inf
    assert pace.due(10**9)
    pace.wait(10**9)


def test_steps_count_from_the_first_question_on_and_not_from_before(clock: Clock) -> None:
    pace = Pace(10.0, clock)
    clock.now += 50
    assert steps(pace) == 0
    clock.now += 3
    assert steps(pace) == 30


def test_a_turn_of_the_speed_holds_from_then_on(clock: Clock) -> None:
    pace = Pace(10.0, clock)
    assert steps(pace) == 0
    clock.now += 3
    pace.times(2.0)
    clock.now += 3
    assert (pace.steps_per_second, steps(pace)) == (20.0, 90)
    pace.times(0.25)
    clock.now += 2
    assert (pace.steps_per_second, steps(pace)) == (5.0, 100)


def test_a_pause_keeps_the_step_and_the_speed(clock: Clock) -> None:
    pace = Pace(10.0, clock)
    assert steps(pace) == 0
    clock.now += 4
    pace.pause()
    clock.now += 1000
    assert (pace.steps_per_second, steps(pace)) == (0.0, 40)
    pace.pause()
    clock.now += 1
    assert (pace.steps_per_second, steps(pace)) == (10.0, 50)


def test_what_is_paused_goes_on_when_it_is_made_faster(clock: Clock) -> None:
    pace = Pace(10.0, clock)
    pace.pause()
    pace.times(2.0)
    assert steps(pace) == 0
    clock.now += 1
    assert steps(pace) == 20


def test_who_waits_for_a_step_that_never_comes_is_let_go_by_the_end_from_another_thread() -> None:
    pace = Pace(0.001)
    waiting = Thread(target=pace.wait, args=(1000,))
    waiting.start()
    pace.pause()
    waiting.join(0.2)
    assert waiting.is_alive()
    pace.to_the_end()
    waiting.join(60)
    assert not waiting.is_alive()
