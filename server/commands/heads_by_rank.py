"""Which rank holds which heads: the newest process start of each rank says."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import HeadRef
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots, topologies
from foreshock.server.store.topology import heads_of_layers


@dataclass
class Holding:
    """What the newest process start of a rank watches."""

    boot: str
    heads: frozenset[HeadRef]
    known: bool
    finished: bool


async def holdings(connection: AsyncConnection, run_ids: Iterable[int]) -> dict[int, dict[int, Holding]]:
    """For each run and rank, the heads that its newest process start holds."""
    identity = boots.c.id, boots.c.run_id, boots.c.rank, boots.c.boot, boots.c.began, boots.c.replayed
    query: Select[Any] = select(*identity, boots.c.finished_status, boots.c.topology)
    by_run: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in await connection.execute(query.where(boots.c.run_id.in_(run_ids))):
        by_run[row.run_id].append(row)
    newest = [row for own in by_run.values() for row in process_starts.newest(own).values()]
    hashes = {row.topology for row in newest if row.topology}
    found = await connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)))
    heads = {row.hash: heads_of_layers(row.layers) for row in found}
    held: dict[int, dict[int, Holding]] = defaultdict(dict)
    for row in newest:
        held[row.run_id][row.rank] = Holding(
            row.boot, frozenset(heads.get(row.topology, ())), row.topology is not None, row.finished_status is not None
        )
    return held
