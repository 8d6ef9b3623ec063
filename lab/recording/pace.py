"""How fast recorded steps go by: a clock of steps that a hand at the keyboard may turn while others wait for it."""

import time
from collections.abc import Callable
from math import inf
from threading import Condition


class Pace:
    """Steps go by from step 0 on, once somebody asks; None: as fast as possible. Any thread may call anything."""

    def __init__(self, steps_per_second: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned = Condition()
        self._speed = inf if steps_per_second is None else steps_per_second
        self._paused = False
        self._step = 0.0
        self._since: float | None = None

    @property
    def steps_per_second(self) -> float:
        """0 while paused, infinite as fast as possible."""
        return 0.0 if self._paused else self._speed

    def due(self, step: int) -> bool:
        """Whether that step has come."""
        with self._turned:
            return self._until(step) <= 0

    def wait(self, step: int) -> None:
        """Return when that step has come."""
        with self._turned:
            while (seconds := self._until(step)) > 0:
                self._turned.wait(None if seconds == inf else seconds)

    def times(self, factor: float) -> None:
        """Go on so many times as fast; what is paused goes on."""
        self._turn(self._speed * factor, paused=False)

    def pause(self) -> None:
        """Stand still, or go on."""
        self._turn(self._speed, paused=not self._paused)

    def to_the_end(self) -> None:
        """Go on as fast as possible."""
        self._turn(inf, paused=False)

    def _turn(self, speed: float, *, paused: bool) -> None:
        with self._turned:
            if self._since is not None:
                now = self._clock()
                self._step, self._since = self._now(now), now
            self._speed, self._paused = speed, paused
            self._turned.notify_all()

    def _now(self, now: float) -> float:
        elapsed = now - (self._since or 0.0)
        return self._step + (self.steps_per_second * elapsed if elapsed > 0 else 0.0)

    def _until(self, step: int) -> float:
        """Seconds until that step."""
        if self.steps_per_second == inf:
            return 0.0
        now = self._clock()
        if self._since is None:
            self._since = now
        left = step - self._now(now)
        if left <= 0:
            return 0.0
        return left / self.steps_per_second if self.steps_per_second else inf
