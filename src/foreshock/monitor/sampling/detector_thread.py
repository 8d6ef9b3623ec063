"""Run the detectors in a thread, which evaluates a sample during the following step, outside the training thread.

A sample that is handed over at one step boundary is taken at the next, with its verdicts. If the thread is late by a
whole step, the boundary waits for it, so that the same samples give the same verdicts at the same steps. It waits at
most a second; after a wait in vain, it does not wait again until the thread has caught up.
"""

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.sampling.collector import Counted

LONGEST_WAIT_SECONDS: Final = 1.0
LONGEST_LAST_WAIT_SECONDS: Final = 5.0


class DetectorResult(NamedTuple):
    """A sample with the detectors' verdicts on it; `risk` is float64 [N], None where they are off.

    active: the verdicts that are not cleared. Other threads must read these instead of the detectors' own, which may
    change at any time.
    """

    counted: Counted
    verdicts: list[wire.Verdict]
    risk: Floats | None
    active: tuple[wire.Verdict, ...] = ()
    readings: Any = None
    """the `Readings` of the sample; None if the detectors failed"""
    undecided: bool = False
    """whether more frequent samples could show the cause of a drift"""


class DetectorThread:
    """Calls `detect` for one sample after another, in a daemon thread that starts with the first sample."""

    def __init__(self, detect: Callable[..., DetectorResult]) -> None:
        self._detect = detect
        self._waiting: queue.SimpleQueue[Callable[[], DetectorResult] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[DetectorResult | BaseException] = queue.SimpleQueue()
        self._under_way = 0
        self._late = False
        self._thread: threading.Thread | None = None

    def put(self, *sample: object) -> None:
        """Hand over a sample, as the arguments of `detect`; a later `take` returns its verdicts."""
        self._under_way += 1
        self._waiting.put(functools.partial(self._detect, *sample))
        if self._thread is None:
            queues = self._waiting, self._results
            thread = threading.Thread(target=_work, args=queues, name="foreshock-detectors", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter exits or cannot start a thread, so this thread does the work
                self._waiting.put(None)
                _work(*queues)
            else:
                self._thread = thread

    def take(self, *, last: bool = False) -> list[DetectorResult]:
        """Return every sample handed over before, with its verdicts, oldest first. Raises errors of `detect` (strict
        mode).

        last: wait longer, for a checkpoint or the end of the training.
        """
        taken: list[DetectorResult] = []
        while self._under_way:
            seconds = LONGEST_LAST_WAIT_SECONDS if last else 0.0 if self._late else LONGEST_WAIT_SECONDS
            try:
                result = self._results.get(timeout=seconds)
            except queue.Empty:  # the machine stalls; a later boundary takes these samples
                self._late = True
                return taken
            self._under_way -= 1
            if isinstance(result, BaseException):
                raise result
            taken.append(result)
        self._late = False
        return taken

    @property
    def idle(self) -> bool:
        """Whether all samples that were handed over are taken, so that the thread does not access any state."""
        return not self._under_way

    def close(self) -> None:
        """End the thread after the samples that are waiting."""
        self._waiting.put(None)


def _work(
    waiting: "queue.SimpleQueue[Callable[[], DetectorResult] | None]",
    results: "queue.SimpleQueue[DetectorResult | BaseException]",
) -> None:
    """Run the thread. Between two samples, it does not have a reference that would keep a dropped agent alive."""
    while (detect := waiting.get()) is not None:
        try:
            results.put(detect())
        except BaseException as fault:  # the thread must not end while a boundary waits for it
            results.put(fault)
        del detect
