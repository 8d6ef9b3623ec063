"""Finds the newest process start of each rank: only these receive orders, and their steps replace older ones.

A process start is one process of a rank, from its start to its end; the wire format calls its id `boot`. A generation
is the set of processes that one launch starts: at most one per rank, all with the same world size. From the first step
of the newest generation on, samples of older generations are ignored, even those of ranks that the newest one lacks.
Launchers give no launch id that all ranks share (torchrun counts restarts on each node), so `arranged` derives
generations from world size, rank, age and silence.

Process starts are ordered by the service's clock: the arrival of the first batch, minus the age that the agent sent
with it (wire.AGE_HEADER, from its monotonic clock). The node's wall clock, which is part of the boot's name, decides
only if a batch came without an age. So neither the order in which batches arrive nor a wrong clock on a node changes
which process start is the newest. Batches that a successor sends from the spool of a dead process
(wire.REPLAYED_HEADER) may register that process, but never place it after one that sent its own batches.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any, Final

from sqlalchemy import Connection, Row, desc, select

from foreshock.contract.metrics.run_metrics import SILENT_SECONDS
from foreshock.server.store.schema import boots

BootKey = tuple[str, int, str]
"""Run, rank and boot of a process start."""
_WALL_CLOCK: Final = re.compile(r"(\d{13})-")
_SECONDS: Final = struct.Struct(">d")
_LEAST_SECONDS: Final = 1e-3
_TOGETHER_SECONDS: Final = 30.0
"""How long a process start may still be heard after its successor began: its last batches may be in flight."""


def place_of(began: float | None, boot: str) -> bytes:
    """Return the sort key of a process start, as bytes: ordered by its start time, then by its name.

    began: the start time in Unix seconds; None if its agent sent no age. Then the time in its name is used; without one
    it sorts first.
    """
    named = _WALL_CLOCK.match(boot)
    by_name = int(named[1]) / 1000 if named else 0.0
    return _SECONDS.pack(max(by_name if began is None else began, 0.0)) + boot.encode()


def first_step(row: Row[Any]) -> int | None:
    """Return the first step of a process start, from which it repeats steps of earlier ones; None if not known yet."""
    first: int | None = row.started_step if row.started_step is not None else row.earliest_step
    return first


def least(*steps: int | None) -> int | None:
    """Return the smallest of the given steps, ignoring None; None if all are None."""
    return min((step for step in steps if step is not None), default=None)


def is_gone(row: Row[Any], after: Iterable[Row[Any]]) -> bool:
    """Whether a process start of the next launch was heard SILENT_SECONDS after this one was heard last.

    after: process starts of other ranks that began after this one fell silent. Without a launch id, this is the only
    sign that a rank was not launched again.
    """
    return row.began is not None and any(one.last_seen >= row.last_seen + SILENT_SECONDS for one in after)


def may_be_gone_or_back(before: Row[Any], now: float) -> bool:
    """Whether a batch of a process start that arrives now may show that others are gone, or that this one is not."""
    if not before.newest:
        return bool(before.last_sequence) and now >= before.last_seen + SILENT_SECONDS
    return before.began is not None and before.last_seen < before.began + SILENT_SECONDS <= now


def arranged(rows: Iterable[Row[Any]]) -> dict[int, tuple[bool, int | None]]:
    """Return, by id of a run's process starts, whether each is one of the newest, and the step up to which it counts.

    From its first step on, a later process start supersedes an earlier one if both have the same rank, if a generation
    with another world size began between them, or if the earlier one is gone (`is_gone`). Process starts that sent
    their own batches come after those known only from a spool.
    """
    latest = sorted(rows, key=lambda row: (row.place, -row.rank), reverse=True)
    world = None
    newest: dict[int, Row[Any]] = {}
    of_rank: dict[int, int | None] = {}
    later: list[Row[Any]] = []
    for row in [row for row in latest if not row.replayed] or latest:
        world = world or row.world_size
        if row.world_size not in (None, world):
            break
        if row.rank not in newest and row.rank not in of_rank:
            if is_gone(row, after := [one for one in later if row.last_seen < (one.began or 0.0)]):
                of_rank[row.rank] = least(*map(first_step, after))
            else:
                newest[row.rank] = row
        later.append(row)
    first: int | None = None
    again, ended = first, first
    found: dict[int, tuple[bool, int | None]] = {}
    for row in [*newest.values(), *(row for row in latest if newest.get(row.rank) is not row)]:
        if row.world_size not in (None, world):
            world, ended = row.world_size, again
        is_newest = newest.get(row.rank) is row
        found[row.id] = is_newest, None if is_newest else least(ended, of_rank.get(row.rank))
        of_rank[row.rank] = least(first_step(row), of_rank.get(row.rank))
        first = least(first_step(row), first)
        if row.world_size is not None:  # a process start of unknown generation does not end another generation
            again = first
    return found


def in_order(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Sort process starts from the oldest to the newest; with equal keys the higher rank comes first."""
    return sorted(rows, key=lambda row: (row.newest, row.place, -row.rank))


def newest(rows: Iterable[Row[Any]]) -> dict[int, Row[Any]]:
    """Return the newest process start of each rank of the newest generation, by rank, ascending."""
    return dict(sorted((row.rank, row) for row in rows if row.newest))


def of_now(connection: Connection, run_ids: Iterable[int]) -> dict[int, list[Row[Any]]]:
    """Return the process starts that describe the present state of each of these runs.

    These are the newest of each rank and, if none of them has sent its description yet, the last one that did.
    """
    wanted = list(run_ids)
    found: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(select(boots).where(boots.c.newest, boots.c.run_id.in_(wanted))):
        found[row.run_id].append(row)
    for run_id in wanted:
        if not any(row.description for row in found[run_id]):
            older = boots.c.run_id == run_id, ~boots.c.newest, boots.c.description.is_not(None)
            last = select(boots).where(*older).order_by(desc(boots.c.place), boots.c.rank).limit(1)
            found[run_id] += connection.execute(last).all()
    return found


def newest_of(connection: Connection, ranks: Collection[tuple[int, int]]) -> dict[tuple[int, int], Row[Any]]:
    """Return the newest process start of each (run id, rank) that has one."""
    run_ids, numbers = {run_id for run_id, _ in ranks}, {rank for _, rank in ranks}
    query = select(boots).where(boots.c.newest, boots.c.run_id.in_(run_ids), boots.c.rank.in_(numbers))
    return {(row.run_id, row.rank): row for row in connection.execute(query) if (row.run_id, row.rank) in ranks}


def latest_of(connection: Connection, run_id: int, without: Collection[int]) -> Row[Any] | None:
    """Return the newest process start of a run that began last, except those with an id in `without`."""
    query = select(boots).where(boots.c.newest, boots.c.run_id == run_id, boots.c.id.not_in(without))
    return connection.execute(query.order_by(desc(boots.c.place)).limit(1)).first()


def overlapping(connection: Connection, run_ids: Iterable[int]) -> dict[int, list[Row[Any]]]:
    """Return, by run, the process starts that were heard while a newer one of their rank existed (for `shared`)."""
    found: dict[int, list[Row[Any]]] = defaultdict(list)
    spoke = boots.c.run_id.in_(list(run_ids)), boots.c.beside, ~boots.c.newest
    for row in connection.execute(select(boots).where(*spoke)):
        found[row.run_id].append(row)
    return found


def shared(rows: Iterable[Row[Any]]) -> dict[int, Row[Any]]:
    """Return the newest process start of each rank that an older, still living process also uses, by rank, ascending.

    Two living processes report the same rank: the older one's samples are hidden, and no order reaches it.
    """
    rows = [row for row in rows if row.began is not None and not row.replayed]
    last = newest(rows)
    return {
        rank: own
        for rank, own in last.items()
        if any(row.rank == rank and row.id != own.id and _lives_next_to(row, own) for row in rows)
    }


def _lives_next_to(older: Row[Any], own: Row[Any]) -> bool:
    both = older.finished_status is None and own.finished_status is None
    heard = older.last_seen > own.began + _TOGETHER_SECONDS
    return both and heard and abs(older.last_seen - own.last_seen) < SILENT_SECONDS


def began_at(now: float, age_seconds: float, before: Row[Any] | None) -> float:
    """Return the start time, in Unix seconds, of a process of this age that sent its own batch.

    before: the newest process start of its run so far. If that one started in the future, the clock was wrong; the new
    one then gets a start time just after it.
    """
    latest = 0.0 if before is None or before.replayed else _SECONDS.unpack_from(before.place)[0]
    return latest + _LEAST_SECONDS if latest > now else now - age_seconds
