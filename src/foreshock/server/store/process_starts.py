"""Which process starts are the newest: those that are listened to, and whose steps count.

A generation of a run is what one launch starts: at most one process of each rank, all with one world size. The newest
process starts are those of the newest generation: from its first step on nothing of an older one counts, whatever
ranks that had. World size, rank, age and silence tell generations apart (`arranged`), since launchers give no name of
a launch that all its ranks share: torchrun counts restarts on each node by itself.

A process start is placed by the service's clock: the moment at which its first batch came, less the age that the
agent sent with it (wire.AGE_HEADER, by its monotonic clock). The wall clock of the node, by which its name sorts,
decides only where no age came with the batch. So neither the order in which batches come nor a node whose
clock is wrong changes who is the newest. What a successor sends from the spool of a dead process
(wire.REPLAYED_HEADER) may make that process known, but never puts it after one that speaks for itself.
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
"""For how long a process start may be heard after a later one of its rank began: its last words are on their way."""


def place_of(began: float | None, boot: str) -> bytes:
    """Where a process start stands among the others: as bytes, which sort as when it began, then as its name.

    began: in Unix seconds; None where its agent sent no age. Then the name may hold a time, else it comes first.
    """
    named = _WALL_CLOCK.match(boot)
    by_name = int(named[1]) / 1000 if named else 0.0
    return _SECONDS.pack(max(by_name if began is None else began, 0.0)) + boot.encode()


def first_step(row: Row[Any]) -> int | None:
    """The step from which a process start does the steps of those before it again; None where it said none yet."""
    first: int | None = row.started_step if row.started_step is not None else row.earliest_step
    return first


def least(*steps: int | None) -> int | None:
    """The smallest of those that are known."""
    return min((step for step in steps if step is not None), default=None)


def is_gone(row: Row[Any], after: Iterable[Row[Any]]) -> bool:
    """Whether one of those of other ranks that began after a process start fell silent has spoken SILENT_SECONDS later.

    Launchers name no launch, so a rank that was not launched again is known by nothing else.
    """
    return row.began is not None and any(one.last_seen >= row.last_seen + SILENT_SECONDS for one in after)


def may_be_gone_or_back(before: Row[Any], now: float) -> bool:
    """Whether a process start that speaks now may show that others are gone, or that it is not gone itself."""
    if not before.newest:
        return bool(before.last_sequence) and now >= before.last_seen + SILENT_SECONDS
    return before.began is not None and before.last_seen < before.began + SILENT_SECONDS <= now


def arranged(rows: Iterable[Row[Any]]) -> dict[int, tuple[bool, int | None]]:
    """Of the process starts of a run, by id: whether it is one of the newest, and the step up to which it counts.

    A later one does again what an earlier one did, from its own first step on, if both are of one rank, if another
    generation, with another world size, has begun between them, or if the earlier one is gone (`is_gone`). What has
    spoken for itself comes after what has not.
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
        if row.world_size is not None:  # what is not known to be of a generation ends none
            again = first
    return found


def in_order(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Process starts, the oldest first, the newest last; those of one place the higher rank first."""
    return sorted(rows, key=lambda row: (row.newest, row.place, -row.rank))


def newest(rows: Iterable[Row[Any]]) -> dict[int, Row[Any]]:
    """The newest process start of each rank of the newest generation, by rank, ascending."""
    return dict(sorted((row.rank, row) for row in rows if row.newest))


def of_now(connection: Connection, run_ids: Iterable[int]) -> dict[int, list[Row[Any]]]:
    """The process starts that say what each of these runs is now, however many there were before.

    Those are the newest of each rank and, where none of them has described itself yet, the last one that did.
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
    """The newest process start of each (run id, rank) that has one."""
    run_ids, numbers = {run_id for run_id, _ in ranks}, {rank for _, rank in ranks}
    query = select(boots).where(boots.c.newest, boots.c.run_id.in_(run_ids), boots.c.rank.in_(numbers))
    return {(row.run_id, row.rank): row for row in connection.execute(query) if (row.run_id, row.rank) in ranks}


def latest_of(connection: Connection, run_id: int, without: Collection[int]) -> Row[Any] | None:
    """The newest process start of a run that began last; `without` these, by id."""
    query = select(boots).where(boots.c.newest, boots.c.run_id == run_id, boots.c.id.not_in(without))
    return connection.execute(query.order_by(desc(boots.c.place)).limit(1)).first()


def beside(connection: Connection, run_ids: Iterable[int]) -> dict[int, list[Row[Any]]]:
    """Of each of these runs, the process starts that have spoken beside the newest of their rank (for `shared`)."""
    found: dict[int, list[Row[Any]]] = defaultdict(list)
    spoke = boots.c.run_id.in_(list(run_ids)), boots.c.beside, ~boots.c.newest
    for row in connection.execute(select(boots).where(*spoke)):
        found[row.run_id].append(row)
    return found


def shared(rows: Iterable[Row[Any]]) -> dict[int, Row[Any]]:
    """The newest process start of each rank beside which an older one of that rank lives on, by rank, ascending.

    Two that live call themselves one rank: what the older one tells is hidden, and no order reaches it.
    """
    rows = [row for row in rows if row.began is not None and not row.replayed]
    last = newest(rows)
    return {
        rank: own
        for rank, own in last.items()
        if any(row.rank == rank and row.id != own.id and _lives_beside(row, own) for row in rows)
    }


def _lives_beside(older: Row[Any], own: Row[Any]) -> bool:
    both = older.finished_status is None and own.finished_status is None
    heard = older.last_seen > own.began + _TOGETHER_SECONDS
    return both and heard and abs(older.last_seen - own.last_seen) < SILENT_SECONDS


def began_at(now: float, age_seconds: float, before: Row[Any] | None) -> float:
    """When a process start began that speaks for itself, is so old, and comes after the newest of its run until now.

    Where that one lies in the future, the clock has been wrong: then what comes later began later.
    """
    latest = 0.0 if before is None or before.replayed else _SECONDS.unpack_from(before.place)[0]
    return latest + _LEAST_SECONDS if latest > now else now - age_seconds
