"""The judge's thread: a sample is judged beside the step that follows it, so that the training thread need not.

What was handed over at one step boundary is taken at the next, judged; where the thread has fallen behind a whole step,
the boundary waits for it, but no longer than a second, and once that was in vain not again before the thread has caught
up. So the same samples give the same verdicts at the same steps.
"""

import queue
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.sampling.collector import Counted

LONGEST_WAIT_SECONDS: Final = 1.0


class Judged(NamedTuple):
    """A sample with what the detectors said of it; `risk` is float64 [N], `near` bool [N] (`near_a_warning`), both None
    where they are off."""

    counted: Counted
    verdicts: list[wire.Verdict]
    risk: Floats | None
    near: npt.NDArray[np.bool_] | None = None


class Judge:
    """Calls `judge` for one sample after the other, in a daemon thread that starts with the first one."""

    def __init__(self, judge: Callable[[Counted], Judged]) -> None:
        self._judge = judge
        self._waiting: queue.SimpleQueue[Counted | None] = queue.SimpleQueue()
        self._judged: queue.SimpleQueue[Judged | BaseException] = queue.SimpleQueue()
        self._under_way = 0
        self._late = False
        self._thread: threading.Thread | None = None

    def put(self, counted: Counted) -> None:
        """Hand a sample over; its verdicts come with a later `take`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="foreshock-judge", daemon=True)
            self._thread.start()
        self._under_way += 1
        self._waiting.put(counted)

    def take(self) -> list[Judged]:
        """Every sample handed over before, judged, oldest first. Raises what `judge` raised (the strict mode)."""
        taken: list[Judged] = []
        while self._under_way:
            try:
                judged = self._judged.get(timeout=0.0 if self._late else LONGEST_WAIT_SECONDS)
            except queue.Empty:  # a stalled machine; they are taken at a later boundary
                self._late = True
                return taken
            self._under_way -= 1
            if isinstance(judged, BaseException):
                raise judged
            taken.append(judged)
        self._late = False
        return taken

    def close(self) -> None:
        """End the thread once it has judged what waits."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (counted := self._waiting.get()) is not None:
            try:
                self._judged.put(self._judge(counted))
            except BaseException as fault:  # nothing may end this thread while a boundary counts on it
                self._judged.put(fault)
