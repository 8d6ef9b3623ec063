"""What a person reads of a service that does not answer: once when it is gone, once when it is back, and at the end."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from foreshock.monitor.transport.spool import Spool, Store

logger: Final = logging.getLogger("foreshock")

_FAILURES: Final = 2
"""In a row, before a word is said: one may be a service that restarts."""
_AGAIN_SECONDS: Final = 600.0
"""Least time between two such words, for a service that comes and goes."""


class Outage:
    """Counts tries without an answer; says so for the first process of a run alone, since all ask the same service."""

    def __init__(self, url: object, *, speaks: bool) -> None:
        self._url = url
        self._speaks = speaks
        self._failures = 0
        self._said = False
        self._said_at = -_AGAIN_SECONDS

    def failed(self, error: BaseException) -> None:
        """A try ended without an answer."""
        self._failures += 1
        if self._failures >= _FAILURES and not self._said and time.monotonic() >= self._said_at + _AGAIN_SECONDS:
            self._say_gone(error)

    def _say_gone(self, error: BaseException) -> None:
        self._said, self._said_at = True, time.monotonic()
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._say(f"no service answers at {self._url} ({why}); training goes on, and what is told is kept for it")

    def answered(self) -> None:
        """An answer came, whatever it says."""
        if self._said:
            self._say(f"the service at {self._url} answers again")
        self._failures, self._said = 0, False

    def ended(self, stores: Sequence[Store], dropped: Counter[str]) -> None:
        """The process ends: what could not be delivered, and what was lost."""
        kept = [store for store in stores if isinstance(store, Spool) and len(store)]
        lost = sum(len(store) for store in stores if not isinstance(store, Spool))
        if kept:
            count, folder = sum(map(len, kept)), kept[0].path.parent
            self._say(f"not sent yet: {_batches(count)} in {folder}, for the next process of this run to send")
        if lost:
            self._say(f"lost, since no service at {self._url} took them and there is no spool: {_batches(lost)}")
        if dropped:
            told = ", ".join(f"{count} ({reason})" for reason, count in sorted(dropped.items()))
            self._say(f"events that were never sent: {told}")

    def _say(self, sentence: str) -> None:
        if self._speaks:
            logger.warning("foreshock: %s", sentence)


def _batches(count: int) -> str:
    return f"{count} batch{'es' * (count > 1)}"
