"""The detectors' thread: a sample is read beside the step that follows it, so that the training thread need not.

What was handed over at one step boundary is taken at the next, with its verdicts. Where the thread has fallen behind a
whole step, the boundary waits for it, but no longer than a second, and once that was in vain not again before the
thread has caught up. So the same samples give the same verdicts at the same steps.
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

    active: the verdicts that are not cleared. No other thread may read those of the detectors, which may change them.
    """

    counted: Counted
    verdicts: list[wire.Verdict]
    risk: Floats | None
    active: tuple[wire.Verdict, ...] = ()
    readings: Any = None
    """the `Readings` of it; None where the detectors failed"""
    undecided: bool = False
    """whether closer samples would show the cause of a drift"""


class DetectorThread:
    """Calls `detect` for one sample after the other, in a daemon thread that starts with the first one."""

    def __init__(self, detect: Callable[..., DetectorResult]) -> None:
        self._detect = detect
        self._waiting: queue.SimpleQueue[Callable[[], DetectorResult] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[DetectorResult | BaseException] = queue.SimpleQueue()
        self._under_way = 0
        self._late = False
        self._thread: threading.Thread | None = None

    def put(self, *sample: object) -> None:
        """Hand a sample over, as `detect` takes it; its verdicts come with a later `take`."""
        self._under_way += 1
        self._waiting.put(functools.partial(self._detect, *sample))
        if self._thread is None:
            queues = self._waiting, self._results
            thread = threading.Thread(target=_work, args=queues, name="foreshock-detectors", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or no thread can be had: there is none beside this one then
                self._waiting.put(None)
                _work(*queues)
            else:
                self._thread = thread

    def take(self, *, last: bool = False) -> list[DetectorResult]:
        """Every sample handed over before, with its verdicts, oldest first. Raises what `detect` raised (strict mode).

        last: wait longer, for a checkpoint or the end of the training.
        """
        taken: list[DetectorResult] = []
        while self._under_way:
            seconds = LONGEST_LAST_WAIT_SECONDS if last else 0.0 if self._late else LONGEST_WAIT_SECONDS
            try:
                result = self._results.get(timeout=seconds)
            except queue.Empty:  # a stalled machine; they are taken at a later boundary
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
        """Whether all that was handed over is taken: only then does the thread touch nothing."""
        return not self._under_way

    def close(self) -> None:
        """End the thread once it has read what waits."""
        self._waiting.put(None)


def _work(
    waiting: "queue.SimpleQueue[Callable[[], DetectorResult] | None]",
    results: "queue.SimpleQueue[DetectorResult | BaseException]",
) -> None:
    """The thread, which between two samples holds nothing that would keep a dropped agent alive."""
    while (detect := waiting.get()) is not None:
        try:
            results.put(detect())
        except BaseException as fault:  # nothing may end this thread while a boundary counts on it
            results.put(fault)
        del detect
