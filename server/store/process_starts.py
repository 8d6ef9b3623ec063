"""Which process start of a rank is the newest: the one that is listened to, and whose steps count.

A process start is placed by the service's clock: the moment at which its first batch came, less the age that the
agent told with it (wire.AGE_HEADER, by its monotonic clock). The wall clock of the node, by which its name sorts,
decides only where no age was told: by agents of 0.1.0. So neither the order in which batches come nor a node whose
clock is wrong changes who is the newest. What a successor sends from the spool of a dead process
(wire.REPLAYED_HEADER) may make that process known, but never puts it after one that speaks for itself.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import Row

_WALL_CLOCK: Final = re.compile(r"(\d{13})-")
_LEAST_SECONDS: Final = 1e-3


def began(row: Row[Any]) -> float:
    """When a process start began, in Unix seconds; 0 where its agent told no age and its name no time."""
    if row.began is not None:
        return float(row.began)
    named = _WALL_CLOCK.match(row.boot)
    return int(named[1]) / 1000 if named else 0.0


def in_order(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Process starts of whole ranks, the oldest first; those of one moment by name, then the higher rank first."""
    rows = list(rows)
    if len(rows) < 2:
        return rows
    by_rank: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_rank[row.rank].append(row)
    living = {_last([row for row in own if not row.replayed] or own).id for own in by_rank.values()}
    return sorted((row for own in by_rank.values() for row in own), key=lambda row: (row.id in living, *_key(row)))


def newest(rows: Iterable[Row[Any]]) -> dict[int, Row[Any]]:
    """The newest process start of each rank, by rank, ascending."""
    last = {row.rank: row for row in in_order(rows)}
    return dict(sorted(last.items()))


def began_at(now: float, age_seconds: float, before: Sequence[Row[Any]]) -> float:
    """When a process start began that speaks for itself, is so old, and comes after those of its rank in `before`.

    Where one of those lies in the future, the clock has been wrong: then what comes later began later.
    """
    latest = max((began(row) for row in before if not row.replayed), default=0.0)
    return latest + _LEAST_SECONDS if latest > now else now - age_seconds


def _key(row: Row[Any]) -> tuple[float, str, int]:
    return began(row), row.boot, -row.rank


def _last(rows: Sequence[Row[Any]]) -> Row[Any]:
    return max(rows, key=_key)
