"""The event log: verdicts, switches, commands, starts and ends.

Clients see the number of an event within its run. `events.id` orders the events of all runs and is used only inside the
service, as the cursor for reading new events.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, desc, func, select, update

from foreshock.contract.incident import Acknowledged, heads_in_words
from foreshock.contract.orders import KINDS, Order
from foreshock.contract.wire import Checkpoint, Clipped, Finished, HeadRef, Started, Switched, Verdict
from foreshock.server.models import IncidentChange, RunEvent
from foreshock.server.readings import read_back
from foreshock.server.store.database import lock_log
from foreshock.server.store.schema import boots, events, runs


def printable(text: str) -> str:
    """Replace control characters, so that the text is one line and can be stored (PostgreSQL rejects NUL)."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def heads_of(row: Any) -> tuple[HeadRef, ...] | None:
    """Return the heads that a command names; None if it applies to every head."""
    return None if row.heads is None else tuple((layer, head) for layer, head in row.heads)


def order_in_words(row: Any) -> str:
    """Return an order's action in words, such as `switch layer 0 head 2 to row_corrected`."""
    does: str = KINDS.get(row.action, row.action)
    return does.format(heads=heads_in_words(heads_of(row)), mode=row.mode)


def nobody_answers(row: Any) -> str:
    """Return the reason for refusing an order because no active rank can carry it out."""
    left = f"Could not {order_in_words(row)}: every rank that could do it has ended."
    return f"{left} Order it again when the run is resumed."


def shared_sentence(ranks: Sequence[int]) -> str:
    """Return a sentence about ranks that several living processes use; it names at most eight of them."""
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return (
        f"Several running processes use rank {named}: only the newest process of each is shown and gets orders. "
        "Give each process its own rank (FORESHOCK_RANK), or each training its own run (FORESHOCK_RUN)."
    )


Logged = Verdict | Switched | Clipped | Checkpoint | Started | Finished
"""The events of a batch that are written to the log."""


def sentence_of(rank: int, event: Logged) -> str:
    """Return a sentence about an event of a rank."""
    match event:
        case Verdict():
            sentence = event.sentence
        case Started():
            layers, heads = len(event.layers), sum(len(layer.heads) for layer in event.layers)
            sentence = f"Rank {rank} started at step {event.step}: {layers} layers, {heads} heads, {event.policy}."
        case Finished():
            sentence = f"Rank {rank} {event.status} at step {event.step}."
        case Switched() if event.heads:
            modes = ", ".join(sorted(set(event.after))) or "nothing"
            sentence = f"Switch of {heads_in_words(event.heads)} to {modes}: {event.outcome}. {event.reason}"
        case Switched():
            sentence = f"Order {event.outcome}. {event.reason}"
        case Checkpoint():
            why = " foreshock asked for it at a warning." if event.requested else ""
            sentence = f"Checkpoint of step {event.step:,}: {event.path}.{why}"
        case Clipped() if event.heads:
            times = max(event.times)
            sentence = (
                f"Rank {rank}: QK-Clip scaled {heads_in_words(event.heads)}, smallest factor {min(event.factors):.3g}, "
                f"at most {times:,} time{'s' if times > 1 else ''} each. {event.reason}"
            )
        case Clipped():
            sentence = f"Rank {rank}: QK-Clip is {'on' if event.on else 'off'}: {event.reason}"
    return printable(sentence.strip())


_NEWEST: Final = select(
    runs.c.id, select(func.max(events.c.number)).where(events.c.run_id == runs.c.id).scalar_subquery()
).where(runs.c.id.in_(bindparam("run_ids", expanding=True)))
_EVENT_ID: Final = re.compile(r"([0-9]{1,18}) ([A-Za-z0-9_.:/-]{1,128})")
MOST_CHECKPOINTS: Final = 1000
"""Maximum number of a run's checkpoints, the newest ones, that a resume plan considers."""
_PAYLOADS: Final = {
    "verdict": Verdict,
    "switched": Switched,
    "clipped": Clipped,
    "checkpoint": Checkpoint,
    "command": Order,
    "incident": IncidentChange,
    "acknowledged": Acknowledged,
}


def write_events(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows of `events`, all with the same columns; each gets the next number of its run.

    The caller has locked the runs. Their `changes` counter is raised, which invalidates cached summaries and series.
    """
    if not rows:
        return
    mine = runs.c.id.in_({row["run_id"] for row in rows})
    connection.execute(update(runs).where(mine).values(changes=runs.c.changes + 1))
    lock_log(connection)
    found = connection.execute(_NEWEST, {"run_ids": sorted({row["run_id"] for row in rows})})
    newest = Counter({run_id: number or 0 for run_id, number in found})
    numbered = []
    for row in rows:
        newest[row["run_id"]] += 1
        numbered.append({**row, "number": newest[row["run_id"]]})
    connection.execute(events.insert(), numbered)


def events_of(connection: Connection, run: str, kinds: Sequence[str], before: int | None, limit: int) -> list[RunEvent]:
    """Return events of a run with numbers below `before` (None: the newest), newest first. kinds: empty for all."""
    query = _events(kinds).where(runs.c.name == run).order_by(desc(events.c.number)).limit(limit)
    if before is not None:
        query = query.where(events.c.number < before)
    return [_as_event(row) for row in connection.execute(query)]


def events_after(
    connection: Connection, cursor: int, limit: int, *, run: str | None = None, kinds: Sequence[str] = ()
) -> list[tuple[int, RunEvent]]:
    """Return events of one run or of all after a cursor, oldest first, each with its own cursor."""
    query = _events(kinds).where(events.c.id > cursor).order_by(events.c.id).limit(limit)
    if run is not None:
        query = query.where(runs.c.name == run)
    return [(row.id, _as_event(row)) for row in connection.execute(query)]


def event_id(event: RunEvent) -> str:
    """Return the id of an event in the stream: its number and its run."""
    return f"{event.id} {event.run}"


def cursor_of(connection: Connection, named: str, prefix: str) -> int | None:
    """Return the cursor of an event by its `event_id`; None if it does not exist or its run lacks the prefix."""
    found = _EVENT_ID.fullmatch(named)
    if found is None or not found[2].startswith(prefix):
        return None
    query = select(events.c.id).join(runs).where(runs.c.name == found[2], events.c.number == int(found[1]))
    cursor: int | None = connection.execute(query).scalar()
    return cursor


def newest_cursor(connection: Connection) -> int:
    """Return the cursor of the newest event of all runs; 0 if there is none."""
    return connection.execute(select(func.max(events.c.id))).scalar() or 0


def _events(kinds: Sequence[str]) -> Select[Any]:
    query = select(events, runs.c.name.label("run")).join(runs, events.c.run_id == runs.c.id)
    return query.where(events.c.kind.in_(kinds)) if kinds else query


def _as_event(row: Row[Any]) -> RunEvent:
    event = RunEvent(
        id=row.number,
        run=row.run,
        kind=row.kind,
        rank=row.rank,
        step=row.step,
        unix_seconds=row.unix_seconds,
        sentence=row.sentence,
    )
    if row.kind in _PAYLOADS:
        setattr(event, row.kind, read_back(_PAYLOADS[row.kind], row.payload, "event", row.id))
    return event


def checkpoints_of(connection: Connection, run_id: int) -> list[Checkpoint]:
    """Return the reported checkpoints of a run, except those of steps that a later process start repeated."""
    query = (
        select(events.c.id, events.c.step, events.c.payload, boots.c.until_step)
        .join(boots, events.c.boot_id == boots.c.id)
        .where(events.c.run_id == run_id, events.c.kind == "checkpoint")
        .order_by(desc(events.c.number))
        .limit(MOST_CHECKPOINTS)
    )
    rows = [row for row in connection.execute(query) if row.until_step is None or row.step <= row.until_step]
    found = (read_back(Checkpoint, row.payload, "event", row.id) for row in rows)
    return [one for one in found if one is not None]
