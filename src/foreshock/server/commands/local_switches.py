"""What a rank switched by itself: an order to the others that hold the heads, or a proposal for people.

Who may send batches must not be able to order by them. A local switch is passed on only where every living rank of the
run started with the policy `auto` and the same mitigation, the rank named a warning of its own that stands, whose cause
is rounding, and the modes are those which that mitigation makes. One boot that says otherwise can only make it more
cautious. Whatever falls short is proposed, and a person decides.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select

from foreshock.contract.causes import curable
from foreshock.contract.modes import is_mode, mode_name, parse_mode
from foreshock.contract.orders import switches
from foreshock.contract.wire import Batch, HeadRef, Switched
from foreshock.server.commands.heads_by_rank import RankHeads
from foreshock.server.commands.lifecycle import Order, create, details_of
from foreshock.server.commands.propose import propose
from foreshock.server.models import CommandState
from foreshock.server.runs.incidents import rejected_heads
from foreshock.server.runs.listing import active_warnings
from foreshock.server.runs.newest import described
from foreshock.server.store import audit, process_starts
from foreshock.server.store.schema import commands

_EXPIRY_SECONDS: Final = 3600.0
_MOST_APART: Final = 16
"""Switches with one outcome that a batch may hold, and each is an order of its own."""


def grouped(reported: Sequence[tuple[Batch, Switched]]) -> list[tuple[Batch, Switched, frozenset[str | None]]]:
    """What ranks switched by themselves, with the warnings that each names: for itself, or where a batch holds many
    with the same outcome, all of them as one. Each costs the writer a dozen statements, and everybody waits for it.
    """
    by_outcome: dict[tuple[int, str], list[tuple[Batch, Switched]]] = defaultdict(list)
    for batch, switched in reported:
        by_outcome[id(batch), switched.outcome].append((batch, switched))
    found = []
    for some in by_outcome.values():
        if len(some) <= _MOST_APART:
            found += [(batch, one, frozenset({one.verdict})) for batch, one in some]
        else:
            batch, first = some[0]
            verdicts = frozenset(one.verdict for _, one in some)
            found.append((batch, _as_one([one for _, one in some], f"{first.reason} ({len(some)} switches)"), verdicts))
    return found


def _as_one(some: Sequence[Switched], reason: str) -> Switched:
    before: dict[HeadRef, str] = {}
    after: dict[HeadRef, str] = {}
    for one in some:
        for ref, old, new in zip(one.heads, one.before, one.after, strict=True):
            before.setdefault(ref, old)
            after[ref] = new
    modes = {"heads": tuple(after), "before": tuple(before.values()), "after": tuple(after.values())}
    return some[0].model_copy(update={**modes, "step": max(one.step for one in some), "reason": reason[-500:]})


def propagate(
    connection: Connection,
    run_id: int,
    ranks: Mapping[int, RankHeads],
    descriptions: dict[int, list[dict[str, Any]]],
    batch: Batch,
    switched: Switched,
    verdicts: frozenset[str | None],
) -> None:
    """Write down what a rank did or proposed, and order or propose the same to the others that hold the heads.

    ranks: who holds which heads of the run. descriptions: by run those of its living process starts, kept here
    from the first switch on that asks for it. verdicts: the warnings that are named for it.
    """
    by_mode: dict[str, list[HeadRef]] = defaultdict(list)
    own = ranks.get(batch.rank)
    living = own is not None and own.boot == batch.boot  # a superseded boot's news comes too late to be an order
    for ref, mode in zip(switched.heads, switched.after, strict=True):
        # a mode of a newer agent cannot be ordered; the history keeps it
        if own is not None and ref in own.heads and is_mode(mode):
            by_mode[mode].append(ref)
    actor = f"rank {batch.rank}"
    audit.append(connection, actor=actor, action="local switch", run=batch.run, details=details_of(switched))
    if switched.outcome not in ("applied", "proposed") or not living:
        return
    applied = switched.outcome == "applied"
    justified = applied and _is_justified(connection, run_id, batch.rank, switched, verdicts, descriptions)
    for mode, heads in sorted(by_mode.items()):
        name = f"{batch.run}|{batch.rank}|{switched.id}|{mode}"
        command_id = f"{switched.outcome}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        if connection.execute(select(commands.c.id).where(commands.c.id == command_id)).first():
            continue
        state: CommandState | None = None
        if applied and not _others(ranks, batch.rank, heads):
            state = "applied"
        elif justified:
            state = "pending"
        elif _is_rejected(connection, run_id, verdicts):
            continue
        order = Order(
            run_id=run_id,
            run=batch.run,
            source="rank" if applied else "agent",
            issued_by=actor,
            reason=switched.reason or "local decision",
            heads=heads,
            mode=mode,
            state=state or "proposed",
            expires=time.time() + _EXPIRY_SECONDS,
            id=command_id,
            answered=(batch, switched) if applied else None,
        )
        if state is None:
            propose(connection, order, {parse_mode(mode): heads})
        else:
            create(connection, order)


def _others(ranks: Mapping[int, RankHeads], rank: int, heads: list[HeadRef]) -> set[int]:
    return {r for r, h in ranks.items() if r != rank and not h.finished and h.heads & set(heads)}


def _is_justified(
    connection: Connection,
    run_id: int,
    rank: int,
    switched: Switched,
    verdicts: frozenset[str | None],
    descriptions: dict[int, list[dict[str, Any]]],
) -> bool:
    """Whether the run's policy and standing warnings of the rank call for what it did."""
    named = [verdict for verdict in verdicts if verdict is not None]
    raised = active_warnings(connection, [run_id], named).get(run_id, []) if named else []
    standing = {w.id for w in raised if w.rank == rank and curable(w.cause) and w.severity != "info"}
    if not verdicts <= standing:
        return False
    if run_id not in descriptions:
        known = process_starts.of_now(connection, [run_id])[run_id]
        living = [boot for boot in process_starts.newest(known).values() if boot.finished_status is None]
        descriptions[run_id] = [described([boot]) for boot in living]
    if {one.get("policy") for one in descriptions[run_id]} != {"auto"}:
        return False
    mitigations = {one.get("mitigation") for one in descriptions[run_id]}
    mitigation = next(iter(mitigations))
    if len(mitigations) != 1 or not mitigation or not all(is_mode(mode) for mode in (mitigation, *switched.before)):
        return False
    before = {ref: int(parse_mode(mode)) for ref, mode in zip(switched.heads, switched.before, strict=True)}
    called_for = {ref: mode_name(mode) for mode, heads in switches(before, before, mitigation).items() for ref in heads}
    return called_for == dict(zip(switched.heads, switched.after, strict=True))


def _is_rejected(connection: Connection, run_id: int, verdicts: frozenset[str | None]) -> bool:
    """Whether a person has rejected a switch on the evidence of every head that these warnings name."""
    named = [verdict for verdict in verdicts if verdict is not None]
    raised = active_warnings(connection, [run_id], named).get(run_id, []) if named else []
    return bool(raised) and {(one.layer, one.head) for one in raised} <= rejected_heads(connection, run_id)
