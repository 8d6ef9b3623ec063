"""Commands on their way: out with the acks, back with the answers; every transition audited.

Each open command goes out with every ack to each rank that holds a named head, until that rank has answered or the
command has expired.
"""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError
from sqlalchemy import Connection, Row, and_, bindparam, select, update

from foreshock.contract.causes import curable
from foreshock.contract.modes import is_mode, mode_name, parse_mode
from foreshock.contract.orders import OPEN, switches
from foreshock.contract.wire import MAX_ACK_BYTES, Batch, Command, HeadRef, Switched
from foreshock.server.commands import (
    WITH_RUN,
    Order,
    answer_of,
    create,
    details_of,
    in_the_way,
    move,
    tracks_of,
)
from foreshock.server.models import CommandState
from foreshock.server.runs.eventlog import ended_before_the_answer, heads_of, order_in_words
from foreshock.server.runs.incidents import rejected_heads
from foreshock.server.runs.listing import active_warnings
from foreshock.server.runs.newest import RankHeads, Ranks, all_ended, concerned, described, heads_by_rank
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import lock_runs
from foreshock.server.store.reading import passed_over
from foreshock.server.store.schema import command_ranks, commands

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
    ranks: Ranks,
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
    named = [verdict for verdict in verdicts if verdict is not None]
    raised = active_warnings(connection, [run_id], named).get(run_id, []) if named else []
    standing = {w.id for w in raised if w.rank == batch.rank and curable(w.cause) and w.severity != "info"}
    justified = applied and verdicts <= standing and _is_of_policy(connection, run_id, switched, descriptions)
    refs = {(one.layer, one.head) for one in raised}
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
        elif refs and refs <= rejected_heads(connection, run_id):  # of every head that these warnings name
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
        if state is not None or not in_the_way(connection, run_id, set(heads)):
            create(connection, order)


def _others(ranks: Ranks, rank: int, heads: list[HeadRef]) -> set[int]:
    return {r for r, h in ranks.items() if r != rank and not h.finished and h.heads & set(heads)}


def _is_of_policy(
    connection: Connection, run_id: int, switched: Switched, descriptions: dict[int, list[dict[str, Any]]]
) -> bool:
    """Whether every process of the run has the policy auto and the one mitigation that makes of the heads what a rank
    made of them."""
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


_OPEN_ORDERS: Final = WITH_RUN.where(
    commands.c.run_id.in_(bindparam("run_ids", expanding=True)), commands.c.state.in_(OPEN)
).order_by(commands.c.number)
_ANSWER_GRACE_SECONDS: Final = 60.0
"""How long after its expiry a delivered command waits for the answer that may be under way."""
_MAX_PER_ACK: Final = 256
_ACK_BYTES: Final = MAX_ACK_BYTES - 4096
"""What the orders of one ack may take; the rest is its envelope. One order of every head there can be fits."""


Orders = dict[tuple[str, int, str], tuple[Command, ...]]
"""What each boot, by run, rank and boot, is ordered to do."""


def exchange(
    connection: Connection,
    run_ids: Mapping[str, int],
    switched: Sequence[tuple[Batch, Switched]],
    group: Sequence[Batch],
) -> Orders:
    """Take in the answers that a group of batches brought, and give out what each boot is ordered to do.

    The caller holds the runs (`Store.lock_runs`).
    """
    switched_runs = {run_ids[batch.run] for batch, _ in switched}
    held = heads_by_rank(connection, switched_runs) if switched_runs else {}
    descriptions: dict[int, list[dict[str, Any]]] = {}
    for batch, answer in switched:
        if answer.command is not None:
            _answer(connection, run_ids[batch.run], held, batch, answer)
    for batch, answer, verdicts in grouped([(b, answer) for b, answer in switched if answer.command is None]):
        run_id = run_ids[batch.run]
        propagate(connection, run_id, held.get(run_id, {}), descriptions, batch, answer, verdicts)
    rows = connection.execute(_OPEN_ORDERS, {"run_ids": sorted(set(run_ids.values()))}).all()
    if not rows:
        return {}
    held |= heads_by_rank(connection, {row.run_id for row in rows} - switched_runs)
    tracks = tracks_of(connection, [row.id for row in rows])
    orders: dict[tuple[str, int, str], list[Command]] = defaultdict(list)
    sizes: Counter[tuple[str, int, str]] = Counter()
    now = time.time()
    for row in rows:
        ranks = held.get(row.run_id, {})
        asked = concerned(heads_of(row), ranks)
        track = tracks.get(row.id, {})
        if _settle(connection, row, ranks, track):
            continue
        for boot_key in sorted({(b.run, b.rank, b.boot) for b in group if b.run == row.run}):
            _, rank, boot = boot_key
            state = track.get(rank)
            answered = state is not None and state.outcome is not None
            late = row.expires is not None and now > row.expires and state is None
            if rank not in asked or answered or late or ranks[rank].boot != boot or not is_mode(row.mode):
                continue
            if len(orders[boot_key]) < _MAX_PER_ACK and (order := _as_wire(row)) is not None:
                sizes[boot_key] += len(order.model_dump_json().encode()) + 1
                if sizes[boot_key] > _ACK_BYTES:
                    continue  # it goes out with a later ack, when those before it are answered
                orders[boot_key].append(order)
                _delivered(connection, row, rank, state)
    return {key: tuple(value) for key, value in orders.items()}


def _as_wire(row: Row[Any]) -> Command | None:
    try:
        return Command(
            id=row.id,
            heads=heads_of(row),
            mode=row.mode,
            expect=row.expect,
            reason=row.reason,
            issued_by=row.issued_by,
            expires_unix_seconds=row.expires,
            expires_step=row.expires_step,
            dry_run=row.dry_run,
        )
    except ValidationError as error:
        passed_over("command", row.id, error.errors(include_url=False, include_input=False)[0]["msg"])
        return None


def _delivered(connection: Connection, row: Row[Any], rank: int, track: Row[Any] | None) -> None:
    same = and_(command_ranks.c.command_id == row.id, command_ranks.c.rank == rank)
    if track is not None:
        connection.execute(update(command_ranks).where(same).values(deliveries=track.deliveries + 1))
        return
    connection.execute(command_ranks.insert().values(command_id=row.id, rank=rank, deliveries=1))
    if row.state != "pending" or not move(connection, row, "delivered", "service", {"rank": rank}):
        details = {"rank": rank, "state": "delivered"}
        audit.append(connection, actor="service", action="command", run=row.run, command=row.id, details=details)


def _answer(
    connection: Connection, run_id: int, held: Mapping[int, dict[int, RankHeads]], batch: Batch, switched: Switched
) -> None:
    asked = WITH_RUN.where(commands.c.id == switched.command, commands.c.run_id == run_id)
    row = connection.execute(asked).first()
    if row is None or switched.outcome == "proposed":
        return
    ranks = held[run_id]
    own = ranks.get(batch.rank)
    if own is None or own.boot != batch.boot:  # the newest has not answered, and may have begun before the switch
        gone = {"rank": batch.rank, "outcome": switched.outcome, "step": switched.step, "process_start": batch.boot}
        actor = f"rank {batch.rank}, a former process"
        audit.append(connection, actor=actor, action="answer", run=row.run, command=row.id, details=gone)
        return
    same = and_(command_ranks.c.command_id == row.id, command_ranks.c.rank == batch.rank)
    values = {"outcome": switched.outcome, "switched": switched.model_dump_json(), "boot": batch.boot}
    track = connection.execute(select(command_ranks).where(same)).first()
    if track is None:
        connection.execute(command_ranks.insert().values(command_id=row.id, rank=batch.rank, deliveries=0, **values))
    elif track.outcome is None:
        connection.execute(update(command_ranks).where(same).values(values))
    else:
        return
    details = {"rank": batch.rank, **details_of(switched)}
    actor = f"rank {batch.rank}"
    audit.append(connection, actor=actor, action="answer", run=row.run, command=row.id, details=details)
    if row.state not in (*OPEN, "cancelled"):
        track_of = tracks_of(connection, [row.id]).get(row.id, {})
        _settle(connection, row, ranks, track_of)


def _settle(connection: Connection, row: Row[Any], ranks: Ranks, track: dict[int, Row[Any]]) -> bool:
    """Close a command that is answered, has expired or can be answered by nobody. True when it is closed."""
    outcomes = {rank: t.outcome for rank, t in track.items() if t.outcome is not None and rank in ranks}
    waiting = {rank for rank in concerned(heads_of(row), ranks) if rank not in outcomes}
    now = time.time()
    expired = row.expires is not None and now > row.expires
    under_way = any(rank in track for rank in waiting) and now < (row.expires or 0) + _ANSWER_GRACE_SECONDS
    state: CommandState
    if outcomes and not waiting:
        state = next((s for s in ("refused", "expired", "dry_run") if s in outcomes.values()), "applied")
    elif expired and not under_way:
        state = "expired"
    elif row.state in OPEN and all_ended(heads_of(row), ranks):
        state = "refused"
    else:
        return False
    if state != row.state:
        answers = {str(rank): outcome for rank, outcome in sorted(outcomes.items())}
        details: dict[str, Any] = {"outcomes": answers, "silent": sorted(waiting)}
        sentence = _unanswered(row, waiting) if state == "expired" and waiting else None
        if state == "refused" and not outcomes:
            details["because"] = ended_before_the_answer(heads_of(row))
            sentence = _ended(row)
        steps = [step for t in track.values() if (step := _applied_at(t)) is not None] if state == "applied" else []
        if steps:
            sentence = f"Command to {order_in_words(row.mode, heads_of(row))} is applied at step {max(steps):,}."
        move(connection, row, state, "service", details, sentence)
    return True


def _applied_at(track: Row[Any]) -> int | None:
    answer = answer_of(track)
    return answer.step if answer is not None and answer.outcome == "applied" else None


def _unanswered(row: Row[Any], silent: set[int]) -> str:
    some = ", ".join(map(str, sorted(silent)[:16])) + (" and more" if len(silent) > 16 else "")
    who = "rank" if len(silent) == 1 else "ranks"
    what = order_in_words(row.mode, heads_of(row))
    return f"Command to {what} is expired; no answer from {who} {some}: {row.reason}"


def _ended(row: Row[Any]) -> str:
    why = "every rank that could switch it ended before it answered"
    return f"Command to {order_in_words(row.mode, heads_of(row))} is refused; {why}: {row.reason}"


def expire(connection: Connection) -> None:
    """Close what has expired; run from time to time, for runs that have gone silent."""
    overdue = commands.c.state.in_((*OPEN, "proposed")), commands.c.expires < time.time()
    owners = set(connection.execute(select(commands.c.run_id).where(*overdue)).scalars())
    lock_runs(connection, owners)
    rows = connection.execute(WITH_RUN.where(*overdue, commands.c.run_id.in_(owners))).all()
    held = heads_by_rank(connection, {row.run_id for row in rows})
    tracks = tracks_of(connection, [row.id for row in rows])
    for row in rows:
        _settle(connection, row, held.get(row.run_id, {}), tracks.get(row.id, {}))
