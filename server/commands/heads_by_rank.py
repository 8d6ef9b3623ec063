"""Which rank holds which heads: the newest process start of each rank says."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import HeadRef
from foreshock.server.access.problems import ProblemError
from foreshock.server.runs.words import heads_in_words
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


def concerned(heads: Iterable[HeadRef] | None, ranks: Mapping[int, Holding]) -> set[int]:
    """The ranks that have to answer an order for these heads, or for every one: those that train on and hold some."""
    return {rank for rank in _holders(heads, ranks) if not ranks[rank].finished}


def _holders(heads: Iterable[HeadRef] | None, ranks: Mapping[int, Holding]) -> set[int]:
    asked = None if heads is None else set(heads)
    return {
        rank
        for rank, holding in ranks.items()
        if asked is None or not holding.known or not holding.heads.isdisjoint(asked)
    }


def all_ended(heads: Iterable[HeadRef] | None, ranks: Mapping[int, Holding]) -> bool:
    """Whether some rank holds some of these heads, and each that does has ended: no answer can come any more.

    A run that is resumed in another shape may have heads for a moment that no rank holds; somebody may yet.
    """
    held = _holders(heads, ranks)
    return bool(held) and all(ranks[rank].finished for rank in held)


def nobody_left(heads: Iterable[HeadRef] | None, ranks: Mapping[int, Holding]) -> bool:
    """Whether it is known that no rank is left to carry out an order for these heads, or for every one."""
    return bool(ranks) and not concerned(heads, ranks)


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


def check_heads(run: str, heads: Sequence[HeadRef], ranks: Mapping[int, Holding]) -> None:
    """Raises ProblemError for an order of no heads, or of heads that no rank ever held."""
    if not heads:
        raise ProblemError(422, "heads is empty; name at least one [layer, head], or give null for every head.")
    held: set[HeadRef] = set()
    for holding in ranks.values():
        held |= holding.heads
    unknown = [ref for ref in heads if ref not in held]
    if held and unknown:
        raise ProblemError(422, f"Run {run} has no {heads_in_words(unknown)}.")


def check_somebody_is_left(run: str, heads: Sequence[HeadRef] | None, ranks: Mapping[int, Holding]) -> None:
    """Raises ProblemError for an order that nobody can carry out: it would stand until it expires, and people wait."""
    if not nobody_left(heads, ranks):
        return
    named = heads_in_words(heads)
    who = f"Run {run} has ended, and nobody is left to switch {named}"
    if not all(holding.finished for holding in ranks.values()):
        who = f"Every rank of run {run} that holds {named} has ended, and nobody is left to switch it"
    raise ProblemError(409, f"{who}. Order it again when the run is resumed.")
