"""Puts process starts of a rank in their order, and cuts what a later one does again."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Row, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.server.curves.rollups import forget_runs
from foreshock.server.ingest.arrivals import UNTOLD, Arrival
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots

Ranks = dict[tuple[int, int], list[Row[Any]]]
"""Process starts by (run id, rank)."""


async def starts_of(connection: AsyncConnection, ranks: Collection[tuple[int, int]]) -> Ranks:
    """Every process start of each (run id, rank)."""
    query = select(boots).where(
        boots.c.run_id.in_({run_id for run_id, _ in ranks}), boots.c.rank.in_({rank for _, rank in ranks})
    )
    found: Ranks = {of: [] for of in ranks}
    for row in await connection.execute(query):
        if (row.run_id, row.rank) in found:
            found[row.run_id, row.rank].append(row)
    return found


async def place(
    connection: AsyncConnection, rows: dict[int, Row[Any]], told: Mapping[int, Arrival], now: float
) -> dict[int, dict[str, Any]]:
    """When those process starts began that tell it for the first time, or for themselves for the first time.

    By row id, what changes of the row; `told` by row id is what came beside their batches.
    """
    new = {i for i, arrival in told.items() if rows[i].began is None or (rows[i].replayed and not arrival.replayed)}
    new = {i for i in new if told[i] != UNTOLD}
    ranks = await starts_of(connection, {(rows[i].run_id, rows[i].rank) for i in new}) if new else {}
    placed: dict[int, dict[str, Any]] = {}
    for i in sorted(new):
        age, replayed = told[i]
        first_heard = rows[i].last_sequence == 0
        others = [row for row in ranks[rows[i].run_id, rows[i].rank] if row.id not in new]
        began = rows[i].began if age is None else now - age if replayed else process_starts.began_at(now, age, others)
        placed[i] = {"began": began, "replayed": replayed and (rows[i].replayed or first_heard)}
    return placed


async def supersede(connection: AsyncConnection, ranks: set[tuple[int, int]]) -> None:
    """The samples of a process start count up to the step at which a later one of the same rank took over."""
    cut: set[int] = set()
    for rows in (await starts_of(connection, ranks)).values():
        until: int | None = None
        for row in reversed(process_starts.in_order(rows)):
            if row.until_step != until:
                await connection.execute(update(boots).where(boots.c.id == row.id).values(until_step=until))
                cut.add(row.run_id)
            first = row.started_step if row.started_step is not None else row.earliest_step
            if first is not None:
                until = first if until is None else min(until, first)
    await forget_runs(connection, cut)
