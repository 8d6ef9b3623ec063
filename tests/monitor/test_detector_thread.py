"""Samples are read in one thread of their own, in their order, and no boundary waits for it for long."""

import threading
import time

import numpy as np
import pytest
from tests.monitor.doubles import ScriptedDetectors
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.detect.detectors import Readings
from foreshock.monitor.sampling import detector_thread
from foreshock.monitor.sampling.collector import Counted
from foreshock.monitor.sampling.detector_thread import DetectorResult, DetectorThread


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


def steps(taken: list[DetectorResult]) -> list[int]:
    return [result.counted.step for result in taken]


def test_what_was_handed_over_is_taken_with_its_verdicts_and_in_order() -> None:
    detectors = DetectorThread(lambda sample: DetectorResult(sample, [], None))
    assert detectors.take() == []
    for step in (1, 2, 3):
        detectors.put(counted(step))
    assert steps(detectors.take()) == [1, 2, 3]
    assert detectors.take() == []
    thread = detectors._thread
    assert thread is not None
    detectors.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.promise("A10")
def test_a_detector_that_is_stuck_holds_a_boundary_for_a_bounded_time_and_is_heard_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detector_thread, "LONGEST_WAIT_SECONDS", 0.05)
    free = threading.Event()

    def detect_when_free(sample: Counted) -> DetectorResult:
        free.wait(20)
        return DetectorResult(sample, [], None)

    detectors = DetectorThread(detect_when_free)
    detectors.put(counted(1))
    began = time.monotonic()
    assert detectors.take() == []
    assert time.monotonic() - began < 5
    monkeypatch.setattr(detector_thread, "LONGEST_WAIT_SECONDS", 20.0)
    detectors.put(counted(2))
    began = time.monotonic()
    assert detectors.take() == []
    assert time.monotonic() - began < 5  # who waited in vain does not wait again
    free.set()
    heard: list[DetectorResult] = []
    while len(heard) < 2:
        time.sleep(0.01)
        heard += detectors.take()
    assert steps(heard) == [1, 2]
    detectors.put(counted(3))
    assert steps(detectors.take()) == [3]


@pytest.mark.promise("A15")
def test_a_fault_that_is_to_be_raised_is_raised_at_the_boundary_and_the_thread_lives_on() -> None:
    def detect_first_badly(sample: Counted) -> DetectorResult:
        if sample.step == 1:
            raise ZeroDivisionError
        return DetectorResult(sample, [], None)

    detectors = DetectorThread(detect_first_badly)
    detectors.put(counted(1))
    detectors.put(counted(2))
    with pytest.raises(ZeroDivisionError):
        detectors.take()
    assert steps(detectors.take()) == [2]


def test_without_a_thread_to_be_had_a_sample_is_read_where_it_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    detectors = DetectorThread(lambda sample: DetectorResult(sample, [], None))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    detectors.put(counted(1))
    assert (steps(detectors.take()), detectors.idle) == ([1], True)
    monkeypatch.undo()
    detectors.put(counted(2))
    assert steps(detectors.take()) == [2]
    detectors.close()


class SlowDetectors(ScriptedDetectors):
    """Take their time for the second sample, and remember which thread they worked in."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.free, self.threads = threading.Event(), set[str]()

    def update(self, readings: Readings) -> list[wire.Verdict]:
        self.threads.add(threading.current_thread().name)
        if len(self.readings) == 1:
            self.free.wait(20)
        return super().update(readings)

    @property
    def active(self) -> list[wire.Verdict]:
        self.threads.add(threading.current_thread().name)
        return self.standing


@pytest.mark.parametrize("in_time", [True, False])
def test_one_thread_alone_updates_and_reads_the_detectors_also_where_a_checkpoint_meets_late_detectors(
    monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    monkeypatch.setattr(detector_thread, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(detector_thread, "LONGEST_LAST_WAIT_SECONDS", 20.0 if in_time else 0.05)
    with attach(tiny_gpt(), sample_every_steps=1, sample_every_seconds=0.0, quiet=True, url=None) as agent:
        agent.detectors = slow = SlowDetectors(4)
        for _ in range(4):
            agent.step(1.0)
        if in_time:
            threading.Timer(0.3, slow.free.set).start()
        saved = agent.state_dict()
        assert saved["detectors"] == ({"seen": 4} if in_time else None)  # none rather than half an update
        slow.free.set()
        monkeypatch.setattr(detector_thread, "LONGEST_LAST_WAIT_SECONDS", 20.0)
        assert agent.state_dict()["detectors"] == {"seen": 4}
        agent.step(1.0)
    assert [reading.step for reading in slow.readings] == [1, 2, 3, 4, 5]
    assert slow.threads == {"foreshock-detectors"}
