import threading
import time

import numpy as np
import pytest

from foreshock.monitor.sampling import judging
from foreshock.monitor.sampling.collector import Counted
from foreshock.monitor.sampling.judging import Judge, Judged


def counted(step: int) -> Counted:
    return Counted(
        step=step,
        since_step=step - 1,
        words=np.zeros((1, 1), dtype=np.int64),
        modes=np.zeros(1, dtype=np.int32),
        losses=np.empty(0),
        grad_norms=np.empty(0),
        norms={},
        learning_rate=None,
        step_seconds=None,
        agent_seconds=None,
    )


def steps(taken: list[Judged]) -> list[int]:
    return [judged.counted.step for judged in taken]


def test_what_was_handed_over_is_taken_judged_and_in_order() -> None:
    judge = Judge(lambda sample: Judged(sample, [], None))
    assert judge.take() == []
    for step in (1, 2, 3):
        judge.put(counted(step))
    assert steps(judge.take()) == [1, 2, 3]
    assert judge.take() == []
    thread = judge._thread
    assert thread is not None
    judge.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.promise("A10")
def test_a_judge_that_is_stuck_holds_a_boundary_for_a_bounded_time_and_is_heard_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "LONGEST_WAIT_SECONDS", 0.05)
    free = threading.Event()

    def judge_when_free(sample: Counted) -> Judged:
        free.wait(20)
        return Judged(sample, [], None)

    judge = Judge(judge_when_free)
    judge.put(counted(1))
    began = time.monotonic()
    assert judge.take() == []
    assert time.monotonic() - began < 5
    monkeypatch.setattr(judging, "LONGEST_WAIT_SECONDS", 20.0)
    judge.put(counted(2))
    began = time.monotonic()
    assert judge.take() == []
    assert time.monotonic() - began < 5  # who waited in vain does not wait again
    free.set()
    heard: list[Judged] = []
    while len(heard) < 2:
        time.sleep(0.01)
        heard += judge.take()
    assert steps(heard) == [1, 2]
    judge.put(counted(3))
    assert steps(judge.take()) == [3]


@pytest.mark.promise("A15")
def test_a_fault_that_is_to_be_raised_is_raised_at_the_boundary_and_the_thread_lives_on() -> None:
    def judge_first_badly(sample: Counted) -> Judged:
        if sample.step == 1:
            raise ZeroDivisionError
        return Judged(sample, [], None)

    judge = Judge(judge_first_badly)
    judge.put(counted(1))
    judge.put(counted(2))
    with pytest.raises(ZeroDivisionError):
        judge.take()
    assert steps(judge.take()) == [2]
