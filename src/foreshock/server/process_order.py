"""Orders process starts, supersedes steps that a later generation repeats, and reports ranks used by several processes.

A run that restarts often has thousands of process starts, so usually only the newest are read.
The agent sends the age of its process, and whether it replays the batches of a dead process, in headers instead of the
batch, because a batch may have waited in a spool.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog
from sqlalchemy import Connection, Row, Select, and_, desc, or_, select, update

from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER
from foreshock.server.readings import changed_runs
from foreshock.server.runs.eventlog import shared_sentence, write_events
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots, events

_MOST_SECONDS: Final = 10 * 365 * 86400.0


class Arrival(NamedTuple):
    """The headers of a batch."""

    age_seconds: float | None = None
    """Age of its process; None if the header is missing or invalid."""
    replayed: bool = False


NO_HEADERS: Final = Arrival()


def arrival_of(headers: Mapping[str, str]) -> Arrival:
    """Read the arrival from a request's headers. Invalid headers are ignored and never cause a refusal."""
    replayed = headers.get(REPLAYED_HEADER) == "true"
    try:
        age = float(headers.get(AGE_HEADER, ""))
    except ValueError:
        return Arrival(replayed=replayed)
    return Arrival(age if 0 <= age <= _MOST_SECONDS else None, replayed)


log = structlog.get_logger()
_OUTCOME: Final = "shared"


def record_shared_ranks(connection: Connection, heard: Sequence[Row[Any]], now: float) -> None:
    """Log the ranks that several living processes use. heard: earlier rows of the process starts that sent batches."""
    superseded = [row for row in heard if row.until_step is not None]
    if not superseded:
        return
    same = boots.c.id.in_([row.id for row in superseded])
    known = connection.execute(select(boots).where(same)).all()
    for of, last in process_starts.newest_of(connection, {(r.run_id, r.rank) for r in superseded}).items():
        older = [row for row in known if (row.run_id, row.rank) == of and row.id != last.id]
        for rank, newest in process_starts.shared([*older, last]).items():
            own = (events.c.boot_id == newest.id, events.c.outcome == _OUTCOME)
            if connection.execute(select(events.c.id).where(*own).limit(1)).first() is not None:
                continue
            sentence = shared_sentence([rank])
            log.warning("two running processes use the same rank", run_id=newest.run_id, rank=rank)
            row = {"run_id": newest.run_id, "boot_id": newest.id, "rank": rank, "kind": "started", "outcome": _OUTCOME}
            written = {"step": newest.newest_step, "unix_seconds": now, "sentence": sentence}
            write_events(connection, [{**row, **written}])


_START: Final[Select[Any]] = select(
    *(boots.c[name] for name in ("id", "rank", "place", "newest", "until_step", "started_step", "earliest_step")),
    *(boots.c[name] for name in ("world_size", "replayed", "began", "last_seen")),
)


def place(
    connection: Connection, rows: dict[int, Row[Any]], arrivals: Mapping[int, Arrival], now: float
) -> dict[int, dict[str, Any]]:
    """Place process starts whose age was received for the first time, or for the first time in a batch of their own.

    Returns the changes of their rows, by row id. arrivals: the headers of their batches, by row id.
    """
    new = {i for i, arrival in arrivals.items() if rows[i].began is None or (rows[i].replayed and not arrival.replayed)}
    new = {i for i in new if arrivals[i] != NO_HEADERS}
    before = {run: process_starts.latest_of(connection, run, new) for run in {rows[i].run_id for i in new}}
    placed: dict[int, dict[str, Any]] = {}
    for i in sorted(new):
        age, replayed = arrivals[i]
        first_heard, last = rows[i].last_sequence == 0, before[rows[i].run_id]
        began = rows[i].began if age is None else now - age if replayed else process_starts.began_at(now, age, last)
        still = replayed and (rows[i].replayed or first_heard)
        placed[i] = {"began": began, "replayed": still, "place": process_starts.place_of(began, rows[i].boot)}
    return placed


def supersede(connection: Connection, moved: Iterable[Row[Any]]) -> None:
    """Store which process starts are the newest, and up to which step every older one counts.

    moved: earlier rows of process starts that are new, whose place, world size or first step changed, or that may show
    that they or others are gone or have returned.
    """
    by_run: dict[int, dict[int, Row[Any]]] = defaultdict(dict)
    for row in moved:
        by_run[row.run_id][row.id] = row
    changed_runs(connection, {run_id for run_id, before in by_run.items() if _supersede(connection, run_id, before)})


def _supersede(connection: Connection, run_id: int, before: Mapping[int, Row[Any]]) -> bool:
    """Update one run; return whether the samples of any process start count up to another step than before."""
    own = boots.c.run_id == run_id
    look = _START.where(or_(and_(own, boots.c.newest), boots.c.id.in_(before)))
    known = {row.id: row for row in connection.execute(look)}
    former = select(boots.c.place).where(own, ~boots.c.newest, boots.c.id.not_in(before))
    below = connection.execute(former.order_by(desc(boots.c.place)).limit(1)).scalar() or b""
    usual = all(row.place > below for row in known.values()) and all(_only_lowers(before[i], known[i]) for i in before)
    if usual and len({row.rank for row in known.values()}) < max(row.world_size or 0 for row in known.values()):
        listened = select(boots.c.rank).where(own, boots.c.newest)
        gone = own, ~boots.c.newest, ~boots.c.replayed, boots.c.rank.not_in(listened), boots.c.id.not_in(before)
        usual = connection.execute(select(boots.c.id).where(*gone).limit(1)).first() is None
    if not usual:
        known = {row.id: row for row in connection.execute(_START.where(own))}
    moved = [known[i] for i in before if process_starts.first_step(known[i]) is not None]
    cut = usual and _lower_the_rest(connection, run_id, moved)
    for i, (newest, until) in process_starts.arranged(known.values()).items():
        row = known[i]
        if (newest, until) != (row.newest, row.until_step):
            connection.execute(update(boots).where(boots.c.id == i).values(newest=newest, until_step=until))
            cut |= until != row.until_step
    return cut


def _only_lowers(before: Row[Any], now: Row[Any]) -> bool:
    """Whether the changes of a process start can only lower, never raise, the steps up to which others count."""
    if before.last_sequence and process_starts.may_be_gone_or_back(before, now.last_seen):
        return False
    same = before.place == now.place and before.world_size in (None, now.world_size)
    first, was = process_starts.first_step(now), process_starts.first_step(before)
    lower = was is None or (first is not None and first <= was)
    placed = not now.replayed and now.world_size is not None
    return placed and (before.last_sequence == 0 or (same and lower))


def _lower_the_rest(connection: Connection, run_id: int, moved: Iterable[Row[Any]]) -> bool:
    """Lower `until_step` of older process starts to the first steps of those that moved; return whether any changed."""
    lowered = 0
    for row in moved:
        first = process_starts.first_step(row)
        older = boots.c.run_id == run_id, boots.c.newest.is_not(True), boots.c.place < row.place
        other = or_(boots.c.world_size < row.world_size, boots.c.world_size > row.world_size)
        ended = select(boots.c.place).where(boots.c.run_id == run_id, boots.c.place < row.place, other)
        last = connection.execute(ended.order_by(desc(boots.c.place)).limit(1)).scalar() or b""
        again = or_(boots.c.rank == row.rank, boots.c.place <= last)
        for further in (boots.c.until_step.is_(None), boots.c.until_step > first):  # each uses the index
            lowered += connection.execute(update(boots).where(*older, again, further).values(until_step=first)).rowcount
    return lowered > 0
