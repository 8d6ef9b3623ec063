"""Token buckets: no run, however noisy, takes the room of the others."""

import math
import random
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

_MAX_BUCKETS: Final = 10_000


class Buckets:
    """One bucket per key, filled at `rate` per second up to two seconds' worth. The oldest are forgotten."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate)
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable, now: float | None = None) -> float:
        """Take one; 0 when there was one, else the seconds until there is."""
        now = time.monotonic() if now is None else now
        level, since = self._levels.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._rate)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate
        self._levels[key] = (level - 1 if wait == 0 else level, now)
        if len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)
        return wait


def retry_after(seconds: float) -> dict[str, str]:
    """A Retry-After header, spread over twice the time so that clients do not come back together."""
    return {"retry-after": str(max(1, math.ceil(seconds * random.uniform(1, 2))))}  # noqa: S311 - spreads, hides nothing
