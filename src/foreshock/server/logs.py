"""The service's log configuration, and its counters since its start."""

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import structlog

_SELDOM_SECONDS: Final = 10.0
lines: Final = Counter({"left out": 0})
"""The number of lines that `Seldom` has left out since the process started."""


class Seldom(logging.Filter):
    """Logs each message at most once in ten seconds, with the number left out, because any client can cause them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[tuple[str, object], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        key = record.msg, record.exc_info and record.exc_info[0]
        since, left_out = self._last.get(key, (-math.inf, 0))
        if self._clock() - since < _SELDOM_SECONDS:
            self._last[key] = since, left_out + 1
            lines["left out"] += 1
            return False
        self._last[key] = self._clock(), 0
        if left_out:
            record.msg = f"{record.msg.rstrip()} ({left_out} more of these were left out)"
        return True


def configure_logs() -> None:
    """Set up structlog, also for messages that libraries log."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").filters = [Seldom()]


class Counters:
    """Counters for /metrics, since the service started."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter(stored=0, duplicate=0, refused=0, busy=0)
        self.refusals: Counter[str] = Counter({"login": 0, "throttled login": 0, "token": 0})
        self.webhooks: Counter[tuple[str, str]] = Counter()
        self.commit_seconds = 0.0
        self.series_dropped = 0
