"""What the processes of a run reported of themselves: their heads, their description, whether they ended."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from foreshock.contract.wire import HeadRef, Layer, Started
from foreshock.server.models import RunStatus
from foreshock.server.readings import heads_of_layers, read_back
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots, topologies


class _Description(Started):
    """The stored form of a `Started`; its layers are stored in `topologies`."""

    layers: tuple[Layer, ...] = ()


def described(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    """Return the description (`Started`) of the newest process start that sent one, without its layers, or {}."""
    for row in reversed(process_starts.in_order(rows)):
        description = (
            read_back(_Description, row.description, "description of boot", row.id) if row.description else None
        )
        if description is not None:
            return description.model_dump(exclude={"layers"})
    return {}


def status_of(rows: Sequence[Row[Any]]) -> RunStatus:
    """Return the status of a run: active until the newest process start of every rank has ended, then the worst end."""
    endings = {row.finished_status for row in process_starts.newest(rows).values()}
    if not endings or None in endings:
        return "active"
    return "failed" if "failed" in endings else "stopped" if "stopped" in endings else "completed"


@dataclass
class RankHeads:
    """The heads that the newest process start of a rank watches."""

    boot: str
    heads: frozenset[HeadRef]
    known: bool
    finished: bool

    def may_hold(self, heads: Collection[object] | None) -> bool:
        """Whether the rank has one of these heads (None: every head), or has not reported its heads yet."""
        return heads is None or not self.known or not self.heads.isdisjoint(heads)


Ranks = Mapping[int, RankHeads]


def concerned(heads: Collection[HeadRef] | None, ranks: Ranks) -> set[int]:
    """Return the ranks that must answer an order for these heads (None: every head): active ones that may have them."""
    return {rank for rank, own in ranks.items() if not own.finished and own.may_hold(heads)}


def all_ended(heads: Collection[HeadRef] | None, ranks: Ranks) -> bool:
    """Whether at least one rank has some of these heads, and all such ranks have ended, so that none can answer.

    If no rank has them, the result is False: after a resume with another world size, a rank may still report them.
    """
    held = [own for own in ranks.values() if own.may_hold(heads)]
    return bool(held) and all(own.finished for own in held)


def nobody_left(heads: Collection[HeadRef] | None, ranks: Ranks) -> bool:
    """Whether it is certain that no active rank can carry out an order for these heads (None: every head)."""
    return bool(ranks) and not concerned(heads, ranks)


def heads_by_rank(connection: Connection, run_ids: Collection[int]) -> dict[int, dict[int, RankHeads]]:
    """Return, for each run and rank, the heads of its newest process start."""
    if not run_ids:
        return {}
    query = select(boots.c.run_id, boots.c.rank, boots.c.boot, boots.c.finished_status, boots.c.topology)
    query = query.where(boots.c.newest, boots.c.run_id.in_(run_ids)).order_by(boots.c.run_id, boots.c.rank)
    newest = connection.execute(query).all()
    hashes = {row.topology for row in newest if row.topology}
    found = connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)))
    heads = {row.hash: frozenset(heads_of_layers(row.layers)) for row in found}
    held: dict[int, dict[int, RankHeads]] = defaultdict(dict)
    for row in newest:
        own = heads.get(row.topology, frozenset())
        held[row.run_id][row.rank] = RankHeads(row.boot, own, row.topology is not None, row.finished_status is not None)
    return held
