"""What was ordered of runs, and what ranks made of it: as far as incidents and the machines' own orders need it."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, desc, select, update

from foreshock.contract.decision import calls_for_switch
from foreshock.contract.incident import Warned
from foreshock.contract.modes import is_mode, parse_mode
from foreshock.contract.orders import Ordered
from foreshock.contract.wire import HeadRef, Switched, Verdict
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import boots, command_ranks, commands, warnings


class Given(NamedTuple):
    """What an order made of a head at a step."""

    step: int
    taken: bool
    """Whether it took a mitigation away."""
    mode: str | None
    """What the head has since; None while other ranks have not answered."""


@dataclass
class Orders:
    """Orders and proposals of a run, the newest first, and what the newest that was carried out made of each head."""

    known: list[tuple[frozenset[HeadRef] | None, Ordered]] = field(default_factory=list)
    given: dict[HeadRef, Given] = field(default_factory=dict)
    judged: list[tuple[frozenset[HeadRef] | None, int, bool]] = field(default_factory=list)
    """Of each switch that was verified its heads, the last step at which a rank carried it out, and whether it held."""

    def modes(self, sampled: Mapping[HeadRef, str], step: int) -> dict[HeadRef, str]:
        """The present modes: those of the sample of `step`, and what orders have changed since."""
        later = {ref: one.mode for ref, one in self.given.items() if one.mode is not None and one.step >= step}
        return {**sampled, **later}

    def held(self, warned: Iterable[Warned]) -> set[HeadRef]:
        """Heads that a person took a mitigation from, until a warning of theirs is raised anew, as the agent has it."""
        anew: dict[tuple[int | None, int | None], int] = {}
        for one in warned:
            if one.verdict.state != "cleared":
                ref = one.verdict.layer, one.verdict.head
                anew[ref] = max(one.raised_step, anew.get(ref, 0))
        return {ref for ref, one in self.given.items() if one.taken and anew.get(ref, -1) <= one.step}


def orders_of(connection: Connection, run_ids: Collection[int]) -> dict[int, Orders]:
    """What was ordered of each of these runs; dry runs, which change nothing, are left out."""
    found: dict[int, Orders] = defaultdict(Orders)
    mine = commands.c.run_id.in_(run_ids), ~commands.c.dry_run
    rows = connection.execute(select(commands).where(*mine).order_by(desc(commands.c.number))).all()
    answers: dict[str, list[Switched]] = defaultdict(list)
    for command_id, switched in carried_out(connection, *mine):
        answers[command_id].append(switched)
    for row in rows:
        own = found[row.run_id]
        heads = None if row.heads is None else frozenset((layer, head) for layer, head in row.heads)
        order = Ordered(
            id=row.id,
            state=row.state,
            mode=row.mode,
            source=row.source,
            who=row.decided_by or row.issued_by,
            decided=row.decided_by is not None,
            unix_seconds=row.decided or row.created,
            verification=row.verification,
        )
        own.known.append((heads, order))
        if row.verification in ("verified", "not arrested") and answers[row.id]:
            last = max(switched.step for switched in answers[row.id])
            own.judged.append((heads, last, row.verification == "verified"))
        for switched in answers[row.id]:
            _take(own.given, switched, heads, everywhere=row.state == "applied", by_hand=row.source != "rank")
    return found


def carried_out(connection: Connection, *only: ColumnElement[bool]) -> Iterator[tuple[str, Switched]]:
    """Of these commands, by id, what ranks did, but for what a later process start has done again without it."""
    by = boots.c.run_id == commands.c.run_id, boots.c.rank == command_ranks.c.rank, boots.c.boot == command_ranks.c.boot
    query = select(commands.c.id, command_ranks.c.switched, boots.c.until_step).join(command_ranks)
    query = query.outerjoin(boots, and_(*by)).where(*only, command_ranks.c.outcome == "applied")
    for row in connection.execute(query.where(command_ranks.c.switched.is_not(None))):
        switched = read_back(Switched, row.switched, "answer of command", row.id)
        if switched is not None and (row.until_step is None or switched.step <= row.until_step):
            yield row.id, switched


def _take(
    given: dict[HeadRef, Given],
    switched: Switched,
    heads: frozenset[HeadRef] | None,
    *,
    everywhere: bool,
    by_hand: bool,
) -> None:
    for ref, before, after in zip(switched.heads, switched.before, switched.after, strict=True):
        if (heads is None or ref in heads) and is_mode(before) and is_mode(after):
            taken = by_hand and bool(parse_mode(before) & ~parse_mode(after))
            given.setdefault(ref, Given(switched.step, taken, after if everywhere else None))


def reject_evidence(connection: Connection, run_id: int, heads: Collection[HeadRef] | None) -> None:
    """Mark the active warnings that call for a switch of these heads, None for every head, as rejected."""
    standing = select(warnings).where(warnings.c.run_id == run_id, warnings.c.active)
    for row in connection.execute(standing).all():
        verdict = read_back(Verdict, row.verdict, "warning", (run_id, row.rank, row.uid))
        if (
            verdict is not None
            and calls_for_switch(verdict)
            and (heads is None or (verdict.layer, verdict.head) in heads)
        ):
            same = warnings.c.run_id == run_id, warnings.c.rank == row.rank, warnings.c.uid == row.uid
            connection.execute(update(warnings).where(*same).values(rejected=True))
