"""Reading the log of what happened: verdicts, switches, commands, starts and ends."""

from typing import Any, Final

from sqlalchemy import Row, desc, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.incident import Acknowledged
from foreshock.contract.wire import Switched, Verdict
from foreshock.server.models import CommandChange, IncidentChange, RunEvent
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import events, runs

KINDS_OF_0_1_0: Final = ("started", "verdict", "switched", "command", "finished")
"""Kinds of events that every reader knows."""


async def read_events(
    connection: AsyncConnection,
    *,
    run: str | None = None,
    kinds: tuple[str, ...] = (),
    after: int | None = None,
    before: int | None = None,
    limit: int,
) -> list[RunEvent]:
    """Events after an id, oldest first; otherwise before an id (or all), newest first."""
    query = select(events, runs.c.name.label("run")).join(runs, events.c.run_id == runs.c.id).limit(limit)
    query = query.order_by(events.c.id if after is not None else desc(events.c.id))
    if run is not None:
        query = query.where(runs.c.name == run)
    if kinds:
        query = query.where(events.c.kind.in_(kinds))
    if after is not None:
        query = query.where(events.c.id > after)
    if before is not None:
        query = query.where(events.c.id < before)
    return [_as_event(row) for row in await connection.execute(query)]


def _as_event(row: Row[Any]) -> RunEvent:
    event = RunEvent(
        id=row.id,
        run=row.run,
        kind=row.kind,
        rank=row.rank,
        step=row.step,
        unix_seconds=row.unix_seconds,
        sentence=row.sentence,
    )
    if row.kind == "verdict":
        event.verdict = read_back(Verdict, row.payload, "event", row.id)
    elif row.kind == "switched":
        event.switched = read_back(Switched, row.payload, "event", row.id)
    elif row.kind == "command":
        event.command = read_back(CommandChange, row.payload, "event", row.id)
    elif row.kind == "incident":
        event.incident = read_back(IncidentChange, row.payload, "event", row.id)
    elif row.kind == "acknowledged":
        event.acknowledged = read_back(Acknowledged, row.payload, "event", row.id)
    return event
