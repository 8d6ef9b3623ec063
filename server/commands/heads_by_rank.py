"""Which rank holds which heads: the newest boot of each rank says."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import HeadRef
from foreshock.server.store.schema import boots, topologies
from foreshock.server.store.topology import heads_of_layers


@dataclass
class Holding:
    """What the newest boot of a rank watches."""

    boot: str
    heads: frozenset[HeadRef]
    known: bool
    finished: bool


async def holdings(connection: AsyncConnection, run_ids: Iterable[int]) -> dict[int, dict[int, Holding]]:
    """For each run and rank, the heads its newest boot holds."""
    query: Select[Any] = select(
        boots.c.run_id, boots.c.rank, boots.c.boot, boots.c.finished_status, boots.c.topology
    ).where(boots.c.run_id.in_(run_ids))
    newest: dict[tuple[int, int], Row[Any]] = {}
    for row in await connection.execute(query):
        key = row.run_id, row.rank
        if key not in newest or newest[key].boot < row.boot:
            newest[key] = row
    hashes = {row.topology for row in newest.values() if row.topology}
    found = await connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)))
    heads = {row.hash: heads_of_layers(row.layers) for row in found}
    held: dict[int, dict[int, Holding]] = defaultdict(dict)
    for (run_id, rank), row in newest.items():
        held[run_id][rank] = Holding(
            row.boot, frozenset(heads.get(row.topology, ())), row.topology is not None, row.finished_status is not None
        )
    return held
