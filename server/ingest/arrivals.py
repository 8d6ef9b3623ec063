"""What an agent tells beside a batch, in headers: how old the process start is, and whether a successor sends for it.

It stands outside of the batch, since a batch may have lain in a spool; services and agents of 0.1.0 know nothing of it.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER

_MOST_SECONDS: Final = 10 * 365 * 86400.0


class Arrival(NamedTuple):
    """How a batch came."""

    age_seconds: float | None = None
    """Since its process started; None where nothing sensible was told."""
    replayed: bool = False


UNTOLD: Final = Arrival()


def arrival_of(headers: Mapping[str, str]) -> Arrival:
    """What the headers of a request tell. Senseless ones tell nothing: no batch is refused for them."""
    replayed = headers.get(REPLAYED_HEADER) == "true"
    try:
        age = float(headers.get(AGE_HEADER, ""))
    except ValueError:
        return Arrival(replayed=replayed)
    return Arrival(age if 0 <= age <= _MOST_SECONDS else None, replayed)
