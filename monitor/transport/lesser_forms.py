"""What of a batch gets through where the batch itself does not: to a service of 0.1.0, or past a proxy with a limit."""

import json

from foreshock.contract import version_0_1_0


def as_0_1_0(payload: bytes) -> bytes | None:
    """The batch in the form of 0.1.0, whose service refuses a whole batch for one word that it does not know."""
    try:
        return version_0_1_0.batch(payload)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # no batch, or a malformed one: it is refused for that


def words_of(payload: bytes) -> bytes | None:
    """The batch without what was measured, for a proxy with a limit: empty if it held no more, None if it held none."""
    batch = json.loads(payload)
    words = [event for event in batch["events"] if event["kind"] not in ("sample", "grams")]
    if len(words) == len(batch["events"]):
        return None
    return json.dumps({**batch, "events": words}).encode() if words else b""
