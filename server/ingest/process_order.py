"""Puts process starts of a rank in their order, and cuts what a later one does again; and says which ranks are shared.

A run that restarts for ever has thousands of them, so only those are read whose place or cut may change.
What an agent tells beside a batch, in headers: how old the process start is, and whether a successor sends for it. It
stands outside of the batch, since a batch may have lain in a spool.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog
from sqlalchemy import Connection, Row, Select, desc, select, update

from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER
from foreshock.server.curves.rollups import forget_runs
from foreshock.server.runs.eventlog import write_events
from foreshock.server.runs.words import shared_sentence
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots, events

_MOST_SECONDS: Final = 10 * 365 * 86400.0


class Arrival(NamedTuple):
    """How a batch came."""

    age_seconds: float | None = None
    """Since its process started; None where the header gives no sensible age."""
    replayed: bool = False


NO_HEADERS: Final = Arrival()


def arrival_of(headers: Mapping[str, str]) -> Arrival:
    """The arrival that a request's headers describe. Senseless ones are passed over: no batch is refused for them."""
    replayed = headers.get(REPLAYED_HEADER) == "true"
    try:
        age = float(headers.get(AGE_HEADER, ""))
    except ValueError:
        return Arrival(replayed=replayed)
    return Arrival(age if 0 <= age <= _MOST_SECONDS else None, replayed)


log = structlog.get_logger()
_OUTCOME: Final = "shared"


def record_shared_ranks(connection: Connection, heard: Sequence[Row[Any]], now: float) -> None:
    """Write down which ranks are shared, of the process starts that were heard just now (their rows as before)."""
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
            log.warning("two processes of one rank", run_id=newest.run_id, rank=rank)
            row = {"run_id": newest.run_id, "boot_id": newest.id, "rank": rank, "kind": "started", "outcome": _OUTCOME}
            written = {"step": newest.newest_step, "unix_seconds": now, "sentence": sentence}
            write_events(connection, [{**row, **written}])


_AT_ONCE: Final = 4
"""Process starts that are read at once, the newest first; a restart changes the last two."""
_START: Final[Select[Any]] = select(
    boots.c.id, boots.c.place, boots.c.newest, boots.c.until_step, boots.c.started_step, boots.c.earliest_step
)


def place(
    connection: Connection, rows: dict[int, Row[Any]], arrivals: Mapping[int, Arrival], now: float
) -> dict[int, dict[str, Any]]:
    """When those process starts began whose age came for the first time, or from themselves for the first time.

    By row id, what changes of the row; `arrivals` by row id is what came beside their batches.
    """
    new = {i for i, arrival in arrivals.items() if rows[i].began is None or (rows[i].replayed and not arrival.replayed)}
    new = {i for i in new if arrivals[i] != NO_HEADERS}
    ranks = {(rows[i].run_id, rows[i].rank) for i in new}
    newest = process_starts.newest_of(connection, ranks) if new else {}
    before = {rank: row for rank, row in newest.items() if row.id not in new}
    placed: dict[int, dict[str, Any]] = {}
    for i in sorted(new):
        age, replayed = arrivals[i]
        first_heard, last = rows[i].last_sequence == 0, before.get((rows[i].run_id, rows[i].rank))
        began = rows[i].began if age is None else now - age if replayed else process_starts.began_at(now, age, last)
        still = replayed and (rows[i].replayed or first_heard)
        placed[i] = {"began": began, "replayed": still, "place": process_starts.place_of(began, rows[i].boot)}
    return placed


def supersede(connection: Connection, moved: Mapping[tuple[int, int], set[bytes]]) -> None:
    """The samples of a process start count up to the step at which a later one of the same rank took over.

    moved: by (run id, rank), the places of those that are new, came from there or to there, or know their first step
    anew.
    """
    cut = {run_id for (run_id, rank), places in moved.items() if _supersede(connection, run_id, rank, places)}
    forget_runs(connection, cut)


def _supersede(connection: Connection, run_id: int, rank: int, places: set[bytes]) -> bool:
    """Whether the samples of some process start of the rank count up to another step than before."""
    own = _START.where(boots.c.run_id == run_id, boots.c.rank == rank)
    before = connection.execute(own.where(boots.c.newest)).first()
    latest = own.order_by(desc(boots.c.place)).limit(1)
    newest = connection.execute(latest.where(~boots.c.replayed)).first()
    newest = newest or connection.execute(latest).one()
    changed: dict[int, int | None] = {newest.id: None} if newest.until_step is not None else {}
    if before is None or before.id != newest.id:
        connection.execute(update(boots).where(boots.c.id == newest.id).values(newest=True))
        if before is not None:
            connection.execute(update(boots).where(boots.c.id == before.id).values(newest=False))
        places = places | {newest.place} | ({before.place} if before is not None else set())
    older, above, below = own.where(boots.c.id != newest.id), newest, None
    if newest.place not in places:  # those above the highest that moved stay as they are
        below = max(places) + b"\0"
        next_above = older.where(boots.c.place > max(places)).order_by(boots.c.place).limit(1)
        above = connection.execute(next_above).first() or newest
    until = _earlier(above.until_step if above.id != newest.id else None, above)
    for row in _downwards(connection, older, below):
        if row.until_step != until:
            changed[row.id] = until
        elif row.place < min(places):
            break  # nothing that stands under it hangs on what moved
        until = _earlier(until, row)
    for i, until in changed.items():
        connection.execute(update(boots).where(boots.c.id == i).values(until_step=until))
    return bool(changed)


def _downwards(connection: Connection, query: Select[Any], below: bytes | None) -> Iterator[Row[Any]]:
    """The process starts of a query below a place, the newest first."""
    while True:
        some = query if below is None else query.where(boots.c.place < below)
        rows = connection.execute(some.order_by(desc(boots.c.place)).limit(_AT_ONCE)).all()
        yield from rows
        if len(rows) < _AT_ONCE:
            return
        below = rows[-1].place


def _earlier(until: int | None, row: Row[Any]) -> int | None:
    """The step up to which the process start before this one counts; `until` is the step up to which this one does."""
    first = row.started_step if row.started_step is not None else row.earliest_step
    return min((step for step in (until, first) if step is not None), default=None)
