"""When a request is sent again: which answers deserve it, how long to wait, and what gets past a limit."""

import email.utils
import json
import math
import random
import time
from typing import Final

FIRST_DELAY_SECONDS: Final = 1.0
LONGEST_DELAY_SECONDS: Final = 60.0
_SPREAD: Final = random.SystemRandom()  # of its own: the trained program's generator is not touched


def is_retryable(status: int) -> bool:
    """408, 429 and every 5xx: trouble that passes by itself."""
    return status in (408, 429) or 500 <= status < 600


def is_final(status: int) -> bool:
    """400 and 422 speak of the batch itself; all else (a redirect, a token, an address, a limit) someone can mend."""
    return status in (400, 422)


def retry_delay(failures: int, retry_after: str | None, random_unit: float | None = None) -> float:
    """Seconds to wait after `failures` (1 or more) failures in a row, 1 to 60, spread out so that clients part ways.

    A valid Retry-After lengthens the wait, up to the longest; it never shortens it.
    """
    unit = _SPREAD.random() if random_unit is None else random_unit
    ceiling = min(FIRST_DELAY_SECONDS * float(2 ** min(failures - 1, 16)), LONGEST_DELAY_SECONDS)
    own = max(FIRST_DELAY_SECONDS, ceiling * (0.5 + 0.5 * unit))
    asked = retry_after_seconds(retry_after)
    return own if asked is None else min(max(own, asked * (1 + 0.25 * unit)), LONGEST_DELAY_SECONDS)


def retry_after_seconds(header: str | None, *, now: float | None = None) -> float | None:
    """Seconds asked for by a Retry-After header of either form; None when it is absent, past or senseless."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
            seconds = moment.timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def without_samples(payload: bytes) -> bytes | None:
    """A batch without its samples, for a proxy with a limit: empty if it held no more, None if it held none."""
    batch = json.loads(payload)
    others = [event for event in batch["events"] if event["kind"] != "sample"]
    if len(others) == len(batch["events"]):
        return None
    return json.dumps({**batch, "events": others}).encode() if others else b""
