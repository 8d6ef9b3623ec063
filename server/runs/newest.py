"""What the newest process starts and samples of runs say: what a run is now."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, and_, desc, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import Layer, Started
from foreshock.server.curves.merging import LIVE_SAMPLES, Axis, axes_of
from foreshock.server.store import process_starts
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import boots, runs, samples

_STEPS_LOOKED_AT = 16


class _Description(Started):
    """As a boot's is stored: its layers stand elsewhere."""

    layers: tuple[Layer, ...] = ()


def described(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    """What the newest process start said of itself, without its layers; empty when none has yet."""
    for row in reversed(process_starts.in_order(rows)):
        said = read_back(_Description, row.description, "description of boot", row.id) if row.description else None
        if said is not None:
            return said.model_dump(exclude={"layers"})
    return {}


async def newest_samples(
    connection: AsyncConnection, run_ids: Collection[int]
) -> dict[int, tuple[Axis, list[Row[Any]]]]:
    """The heads of each run that has a sample, and the samples of its newest reading: three queries for all runs.

    It is the newest step that as many ranks have reported as any of the last few.
    """
    live = LIVE_SAMPLES.order_by(None)
    steps = live.with_only_columns(samples.c.step).where(samples.c.run_id == runs.c.id).group_by(samples.c.step)
    nth = steps.order_by(desc(samples.c.step)).offset(_STEPS_LOOKED_AT - 1).limit(1).correlate(runs).scalar_subquery()
    lately = select(runs.c.id, func.coalesce(nth, 0).label("first")).where(runs.c.id.in_(run_ids)).cte()
    ranks = func.count(func.distinct(boots.c.rank))
    place = func.row_number().over(partition_by=samples.c.run_id, order_by=(desc(ranks), desc(samples.c.step)))
    placed = live.with_only_columns(samples.c.run_id, samples.c.step, place.label("place"))
    placed = placed.join(lately, and_(samples.c.run_id == lately.c.id, samples.c.step >= lately.c.first))
    newest = placed.group_by(samples.c.run_id, samples.c.step).cte()
    same = and_(samples.c.run_id == newest.c.run_id, samples.c.step == newest.c.step, newest.c.place == 1)
    rows: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in await connection.execute(LIVE_SAMPLES.join(newest, same)):
        rows[row.run_id].append(row)
    axes = await axes_of(connection, rows.keys())
    return {run_id: (axes[run_id], own) for run_id, own in rows.items()}
