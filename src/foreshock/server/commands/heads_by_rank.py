"""Which rank holds which heads: the newest process start of each rank says."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from foreshock.contract.modes import mode_name, parse_mode
from foreshock.contract.orders import switches
from foreshock.contract.wire import HeadRef
from foreshock.server.access.problems import ProblemError
from foreshock.server.models import SwitchedTo, SwitchPlan
from foreshock.server.runs.incidents import present
from foreshock.server.runs.words import heads_in_words
from foreshock.server.store.reading import heads_of_layers
from foreshock.server.store.schema import boots, topologies


@dataclass
class RankHeads:
    """What the newest process start of a rank watches."""

    boot: str
    heads: frozenset[HeadRef]
    known: bool
    finished: bool


def concerned(heads: Iterable[HeadRef] | None, ranks: Mapping[int, RankHeads]) -> set[int]:
    """The ranks that have to answer an order for these heads, or for every one: those that train on and hold some."""
    return {rank for rank in _holders(heads, ranks) if not ranks[rank].finished}


def _holders(heads: Iterable[HeadRef] | None, ranks: Mapping[int, RankHeads]) -> set[int]:
    asked = None if heads is None else set(heads)
    return {
        rank
        for rank, holding in ranks.items()
        if asked is None or not holding.known or not holding.heads.isdisjoint(asked)
    }


def all_ended(heads: Iterable[HeadRef] | None, ranks: Mapping[int, RankHeads]) -> bool:
    """Whether some rank holds some of these heads, and each that does has ended: no answer can come any more.

    A run that is resumed in another shape may have heads for a moment that no rank holds; somebody may yet.
    """
    held = _holders(heads, ranks)
    return bool(held) and all(ranks[rank].finished for rank in held)


def nobody_left(heads: Iterable[HeadRef] | None, ranks: Mapping[int, RankHeads]) -> bool:
    """Whether it is known that no rank is left to carry out an order for these heads, or for every one."""
    return bool(ranks) and not concerned(heads, ranks)


def heads_by_rank(connection: Connection, run_ids: Iterable[int]) -> dict[int, dict[int, RankHeads]]:
    """For each run and rank, the heads that its newest process start holds."""
    query = select(boots.c.run_id, boots.c.rank, boots.c.boot, boots.c.finished_status, boots.c.topology)
    query = query.where(boots.c.newest, boots.c.run_id.in_(run_ids)).order_by(boots.c.run_id, boots.c.rank)
    newest = connection.execute(query).all()
    hashes = {row.topology for row in newest if row.topology}
    found = connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)))
    heads = {row.hash: heads_of_layers(row.layers) for row in found}
    held: dict[int, dict[int, RankHeads]] = defaultdict(dict)
    for row in newest:
        held[row.run_id][row.rank] = RankHeads(
            row.boot, frozenset(heads.get(row.topology, ())), row.topology is not None, row.finished_status is not None
        )
    return held


def modes_here(connection: Connection, run_id: int) -> tuple[dict[HeadRef, int], set[HeadRef]]:
    """The present mode of every head that a rank holds, plain where no head's is known; and the heads that no machine
    switches."""
    modes, held = present(connection, run_id)
    ranks = heads_by_rank(connection, [run_id]).get(run_id, {})
    refs = {ref for holding in ranks.values() for ref in holding.heads}
    return {ref: modes.get(ref, 0) for ref in refs if ref in modes or not modes}, held


def plan(connection: Connection, run_id: int, wanted: str) -> SwitchPlan:
    """What an order of a mode for every head does: it adds the mode to what each has, and plain takes all away."""
    here, _ = modes_here(connection, run_id)
    found = switches(here, here, wanted) if parse_mode(wanted) else {}
    changes = [SwitchedTo(mode=mode_name(mode), heads=heads) for mode, heads in found.items()]
    changed = {ref for heads in found.values() for ref in heads}
    kept = [ref for ref, mode in sorted(here.items()) if ref not in changed and mode_name(mode) != wanted]
    if not parse_mode(wanted) or (not kept and all(each.mode == wanted for each in changes)):
        return SwitchPlan(changes=[SwitchedTo(mode=wanted, heads=None)], kept=[])
    return SwitchPlan(changes=changes, kept=kept)


def check_heads(run: str, heads: Sequence[HeadRef], ranks: Mapping[int, RankHeads]) -> None:
    """Raises ProblemError for an order of no heads, or of heads that no rank ever held."""
    if not heads:
        raise ProblemError(422, "heads is empty; name at least one [layer, head], or give null for every head.")
    held: set[HeadRef] = set()
    for holding in ranks.values():
        held |= holding.heads
    unknown = [ref for ref in heads if ref not in held]
    if held and unknown:
        raise ProblemError(422, f"Run {run} has no {heads_in_words(unknown)}.")


def check_somebody_is_left(run: str, heads: Sequence[HeadRef] | None, ranks: Mapping[int, RankHeads]) -> None:
    """Raises ProblemError for an order that nobody can carry out: it would stand until it expires, and people wait."""
    if not nobody_left(heads, ranks):
        return
    named = heads_in_words(heads)
    who = f"Run {run} has ended, and nobody is left to switch {named}"
    if not all(holding.finished for holding in ranks.values()):
        who = f"Every rank of run {run} that holds {named} has ended, and nobody is left to switch it"
    raise ProblemError(409, f"{who}. Order it again when the run is resumed.")
