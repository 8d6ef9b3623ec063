"""Log lines about a service that does not answer: once when it fails, once when it answers again, and at the end."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from foreshock.contract.route import RouteError, untrusted
from foreshock.monitor.transport.spool import Spool, Store

logger: Final = logging.getLogger("foreshock")

_FAILURES: Final = 2
"""Number of failed attempts in a row before a warning; a single one may be a restart of the service."""
_AGAIN_SECONDS: Final = 600.0
"""Minimum time between two of these warnings, if a service repeatedly fails and recovers."""


class Outage:
    """Counts attempts without an answer. Only the first process of a run warns, because all use the same service."""

    def __init__(self, url: object, *, warns: bool) -> None:
        self._url = url
        self._warns = warns
        self._failures = 0
        self._warned = False
        self._warned_at = -_AGAIN_SECONDS
        self._why = ""

    def failed(self, error: BaseException, route: str = "") -> None:
        """Record an attempt without an answer. route: its proxy, as text to append to the address."""
        self._failures += 1
        named = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._why = (str(error) if isinstance(error, RouteError) else named) + untrusted(error)
        enough = self._failures >= _FAILURES or isinstance(error, RouteError)
        if enough and not self._warned and time.monotonic() >= self._warned_at + _AGAIN_SECONDS:
            self._warned, self._warned_at = True, time.monotonic()
            self._warn(
                f"no service answers at {self._url}{route} ({self._why}); training continues, and samples wait to "
                "be sent"
            )

    def answered(self, status: int = 200) -> None:
        """Record an answer with any status."""
        if self._warned:
            self._warn(f"the service at {self._url} answers again")
        self._failures, self._warned, self._why = 0, False, f"it answered {status}"

    def ended(self, stores: Sequence[Store], dropped: Counter[str]) -> None:
        """Log undelivered and lost batches when the process ends."""
        kept = [store for store in stores if isinstance(store, Spool) and len(store)]
        lost = sum(len(store) for store in stores if not isinstance(store, Spool))
        last = f"; last attempt: {self._why}" if self._why else ""
        if kept:
            count, folder = sum(map(len, kept)), kept[0].path.parent
            self._warn(f"not sent yet: {_batches(count)} in {folder}, for the next process of this run to send{last}")
        if lost:
            self._warn(f"lost {_batches(lost)}: {self._url} did not accept them, and no spool is set{last}")
        if dropped:
            counts = ", ".join(f"{count} ({reason})" for reason, count in sorted(dropped.items()))
            self._warn(f"events that were never sent: {counts}")

    def _warn(self, sentence: str) -> None:
        if self._warns:
            logger.warning("foreshock: %s", sentence)


def _batches(count: int) -> str:
    return f"{count} batch{'es' * (count > 1)}"
