"""Steps go by at the pace that was asked for."""

import time
from math import inf

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


def test_who_waits_for_a_step_gets_on_when_it_has_come() -> None:
    pace = Pace(200.0)
    began = time.monotonic()
    pace.wait(0)
    pace.wait(20)
    assert time.monotonic() - began >= 0.1
    assert pace.due(20)
