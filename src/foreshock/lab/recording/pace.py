"""How fast recorded steps go by: a clock of steps."""

import time
from collections.abc import Callable
from math import inf


class Pace:
    """Steps go by from step 0 on, once somebody asks; None: as fast as possible."""

    def __init__(self, steps_per_second: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.steps_per_second = inf if steps_per_second is None else steps_per_second
        self._since: float | None = None

    def due(self, step: int) -> bool:
        """Whether that step has come."""
        return self._until(step) <= 0

    def wait(self, step: int) -> None:
        """Return when that step has come."""
        time.sleep(max(0.0, self._until(step)))

    def _until(self, step: int) -> float:
        """Seconds until that step; 0 or less once it has come."""
        if self.steps_per_second == inf:
            return 0.0
        now = self._clock()
        if self._since is None:
            self._since = now
        return step / self.steps_per_second - (now - self._since)
