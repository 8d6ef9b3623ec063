"""Commands: created once, delivered with every ack until each rank that holds a named head has answered.

    proposed -> pending | rejected | expired
    pending -> delivered | expired
    delivered -> applied | refused | expired | dry_run

Delivery is at least once; the agent applies an id once. No collective and no common step: the ranks may switch at
different steps (house decision 5).
"""

import hashlib
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row, Select, and_, desc, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import Batch, Command, HeadRef, Switched
from foreshock.server import audit
from foreshock.server.models import CommandChange, CommandRequest, CommandState, CommandStatus, RankAnswer
from foreshock.server.problems import ProblemError
from foreshock.server.recorder import Recorded
from foreshock.server.schema import boots, command_ranks, commands, events, runs, topologies
from foreshock.server.store import Store
from foreshock.server.topology import heads_of_layers
from foreshock.server.words import heads_in_words

OPEN: Final = ("pending", "delivered")
_ANSWER_GRACE_SECONDS: Final = 60.0
"""How long after its expiry a delivered command waits for the answer that may be under way."""
_MAX_PER_ACK: Final = 256


@dataclass(frozen=True)
class Order:
    """A command about to be created."""

    run_id: int
    run: str
    source: str
    issued_by: str
    reason: str
    heads: Sequence[HeadRef] | None
    mode: str
    state: CommandState = "pending"
    expect: str | None = None
    dry_run: bool = False
    expires: float | None = None
    expires_step: int | None = None
    idempotency_key: str | None = None
    request_hash: str | None = None
    id: str = ""
    answered_by: int | None = None
    """The rank that has it already, when a local switch is passed on."""


async def create(store: Store, connection: AsyncConnection, order: Order) -> str:
    """Create a command with its audit row and event; its id."""
    command_id = order.id or f"cmd-{uuid.uuid4().hex}"
    heads = None if order.heads is None else [list(ref) for ref in order.heads]
    await connection.execute(
        commands.insert().values(
            id=command_id,
            run_id=order.run_id,
            state=order.state,
            source=order.source,
            issued_by=order.issued_by[:128],
            reason=order.reason[:500],
            heads=heads,
            mode=order.mode,
            expect=order.expect,
            dry_run=order.dry_run,
            created=time.time(),
            expires=order.expires,
            expires_step=order.expires_step,
            idempotency_key=order.idempotency_key,
            request_hash=order.request_hash,
        )
    )
    if order.answered_by is not None:
        await connection.execute(
            command_ranks.insert().values(
                command_id=command_id, rank=order.answered_by, deliveries=0, outcome="applied", switched=None
            )
        )
    row = (await connection.execute(select(commands).where(commands.c.id == command_id))).one()
    await _tell(store, connection, row, order.run, order.state, order.issued_by, {"reason": order.reason[:500]})
    return command_id


async def create_from_request(
    store: Store,
    connection: AsyncConnection,
    run: str,
    request: CommandRequest,
    caller: str,
    idempotency_key: str | None,
    default_expiry_seconds: float,
) -> tuple[str, bool]:
    """A person's command: goes out under every policy. Its id, and whether it is new."""
    run_id = await run_id_of(connection, run)
    digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    if idempotency_key is not None:
        same = (commands.c.run_id == run_id, commands.c.idempotency_key == idempotency_key)
        old = (await connection.execute(select(commands.c.id, commands.c.request_hash).where(*same))).first()
        if old is not None and old.request_hash != digest:
            raise ProblemError(409, "This Idempotency-Key was used for another command; take a new key.")
        if old is not None:
            return old.id, False
    if request.heads is not None:
        await _check_heads(connection, run_id, run, request.heads)
    order = Order(
        run_id=run_id,
        run=run,
        source="api",
        issued_by=f"{request.who} ({caller})",
        reason=request.reason,
        heads=request.heads,
        mode=request.mode,
        expect=request.expect,
        dry_run=request.dry_run,
        expires=time.time() + (request.expires_in_seconds or default_expiry_seconds),
        expires_step=request.expires_step,
        idempotency_key=idempotency_key,
        request_hash=digest,
    )
    return await create(store, connection, order), True


async def run_id_of(connection: AsyncConnection, run: str) -> int:
    """The id of a run. Raises ProblemError when there is none."""
    run_id: int | None = (await connection.execute(select(runs.c.id).where(runs.c.name == run))).scalar()
    if run_id is None:
        raise ProblemError(404, f"There is no run {run[:128]!r}; GET /v1/runs lists them.")
    return run_id


async def _check_heads(connection: AsyncConnection, run_id: int, run: str, heads: Sequence[HeadRef]) -> None:
    if not heads:
        raise ProblemError(422, "heads is empty; name at least one [layer, head], or give null for every head.")
    held: set[HeadRef] = set()
    for holding in (await holdings(connection, [run_id])).get(run_id, {}).values():
        held |= holding.heads
    unknown = [ref for ref in heads if ref not in held]
    if held and unknown:
        raise ProblemError(422, f"Run {run} has no {heads_in_words(unknown)}.")


async def decide(
    store: Store, connection: AsyncConnection, command_id: str, approve: bool, who: str, reason: str, expiry: float
) -> None:
    """Approve or reject a proposed command."""
    row = await _command(connection, command_id)
    if row.state != "proposed":
        raise ProblemError(409, f"Command {command_id} is {row.state}, no longer proposed.")
    state: CommandState = "pending" if approve else "rejected"
    values: dict[str, Any] = {"state": state}
    if approve:
        values["expires"] = time.time() + expiry
    await connection.execute(update(commands).where(commands.c.id == command_id).values(values))
    await _tell(store, connection, row, row.run, state, who, {"reason": reason, "decided": True})


async def _command(connection: AsyncConnection, command_id: str) -> Row[Any]:
    query = select(commands, runs.c.name.label("run")).join(runs).where(commands.c.id == command_id)
    row = (await connection.execute(query.with_for_update())).first()
    if row is None:
        raise ProblemError(404, f"There is no command {command_id[:128]!r}.")
    return row


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


def _concerned(row: Row[Any], ranks: dict[int, Holding]) -> set[int]:
    """The ranks that have to answer a command."""
    heads = None if row.heads is None else {(layer, head) for layer, head in row.heads}
    return {
        rank
        for rank, holding in ranks.items()
        if not holding.finished and (heads is None or not holding.known or holding.heads & heads)
    }


async def exchange(
    store: Store, connection: AsyncConnection, done: Recorded, group: Sequence[Batch]
) -> dict[tuple[str, int, str], tuple[Command, ...]]:
    """Take in the answers that a group of batches brought, and give out what each boot is ordered to do."""
    for batch, switched in done.switched:
        if switched.command is not None:
            await _answer(store, connection, done.run_ids[batch.run], batch, switched)
        else:
            await _pass_on(store, connection, done.run_ids[batch.run], batch, switched)
    query = (
        select(commands, runs.c.name.label("run"))
        .join(runs)
        .where(commands.c.run_id.in_(set(done.run_ids.values())), commands.c.state.in_(OPEN))
        .order_by(commands.c.number)
    )
    rows = (await connection.execute(query.with_for_update())).all()
    if not rows:
        return {}
    held = await holdings(connection, {row.run_id for row in rows})
    tracks = await _tracks(connection, [row.id for row in rows])
    orders: dict[tuple[str, int, str], list[Command]] = defaultdict(list)
    now = time.time()
    for row in rows:
        ranks = held.get(row.run_id, {})
        concerned = _concerned(row, ranks)
        track = tracks.get(row.id, {})
        if await _settle(store, connection, row, concerned, track):
            continue
        for boot_key in sorted({(b.run, b.rank, b.boot) for b in group if b.run == row.run}):
            _, rank, boot = boot_key
            state = track.get(rank)
            answered = state is not None and state.outcome is not None
            late = row.expires is not None and now > row.expires and state is None
            if rank not in concerned or answered or late or ranks[rank].boot != boot:
                continue
            if len(orders[boot_key]) < _MAX_PER_ACK:
                orders[boot_key].append(_as_wire(row))
                await _delivered(store, connection, row, rank, state)
    return {key: tuple(value) for key, value in orders.items()}


async def _tracks(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, dict[int, Row[Any]]]:
    tracks: dict[str, dict[int, Row[Any]]] = defaultdict(dict)
    for row in await connection.execute(select(command_ranks).where(command_ranks.c.command_id.in_(ids))):
        tracks[row.command_id][row.rank] = row
    return tracks


def _as_wire(row: Row[Any]) -> Command:
    return Command(
        id=row.id,
        heads=None if row.heads is None else tuple((layer, head) for layer, head in row.heads),
        mode=row.mode,
        expect=row.expect,
        reason=row.reason,
        issued_by=row.issued_by,
        expires_unix_seconds=row.expires,
        expires_step=row.expires_step,
        dry_run=row.dry_run,
    )


async def _delivered(
    store: Store, connection: AsyncConnection, row: Row[Any], rank: int, track: Row[Any] | None
) -> None:
    same = and_(command_ranks.c.command_id == row.id, command_ranks.c.rank == rank)
    if track is not None:
        await connection.execute(update(command_ranks).where(same).values(deliveries=track.deliveries + 1))
        return
    await connection.execute(command_ranks.insert().values(command_id=row.id, rank=rank, deliveries=1))
    changed = update(commands).where(commands.c.id == row.id, commands.c.state == "pending").values(state="delivered")
    if (await connection.execute(changed)).rowcount:
        await _tell(store, connection, row, row.run, "delivered", "service", {"rank": rank})
    else:
        details = {"rank": rank, "state": "delivered"}
        await audit.append(
            store, connection, actor="service", action="command", run=row.run, command=row.id, details=details
        )


async def _answer(store: Store, connection: AsyncConnection, run_id: int, batch: Batch, switched: Switched) -> None:
    query = select(commands, runs.c.name.label("run")).join(runs)
    row = (
        await connection.execute(query.where(commands.c.id == switched.command, commands.c.run_id == run_id))
    ).first()
    if row is None or switched.outcome == "proposed":
        return
    same = and_(command_ranks.c.command_id == row.id, command_ranks.c.rank == batch.rank)
    values = {"outcome": switched.outcome, "switched": switched.model_dump_json()}
    track = (await connection.execute(select(command_ranks).where(same))).first()
    if track is None:
        await connection.execute(
            command_ranks.insert().values(command_id=row.id, rank=batch.rank, deliveries=0, **values)
        )
    elif track.outcome is None:
        await connection.execute(update(command_ranks).where(same).values(values))
    else:
        return
    details = {
        "rank": batch.rank,
        "outcome": switched.outcome,
        "step": switched.step,
        "heads": [list(ref) for ref in switched.heads[:64]],
        "before": sorted(set(switched.before)),
        "after": sorted(set(switched.after)),
        "reason": switched.reason,
    }
    actor = f"rank {batch.rank}"
    await audit.append(store, connection, actor=actor, action="answer", run=row.run, command=row.id, details=details)
    if row.state not in OPEN:
        ranks = (await holdings(connection, [run_id])).get(run_id, {})
        track_of = (await _tracks(connection, [row.id])).get(row.id, {})
        await _settle(store, connection, row, _concerned(row, ranks), track_of)


async def _settle(
    store: Store,
    connection: AsyncConnection,
    row: Row[Any],
    concerned: set[int],
    track: dict[int, Row[Any]],
) -> bool:
    """Close a command when every rank concerned has answered, or when it has expired. True when it is closed."""
    outcomes = {rank: t.outcome for rank, t in track.items() if t.outcome is not None}
    waiting = {rank for rank in concerned if rank not in outcomes}
    now = time.time()
    expired = row.expires is not None and now > row.expires
    under_way = any(rank in track for rank in waiting) and now < (row.expires or 0) + _ANSWER_GRACE_SECONDS
    state: CommandState
    if outcomes and not waiting:
        state = next((s for s in ("refused", "expired", "dry_run") if s in outcomes.values()), "applied")
    elif expired and not under_way:
        state = "expired"
    else:
        return False
    if state != row.state:
        await connection.execute(update(commands).where(commands.c.id == row.id).values(state=state))
        details = {"outcomes": {str(rank): outcome for rank, outcome in sorted(outcomes.items())}}
        await _tell(store, connection, row, row.run, state, "service", details)
    return True


async def expire(store: Store, connection: AsyncConnection) -> None:
    """Close what has expired; run from time to time, for runs that have gone silent."""
    query = (
        select(commands, runs.c.name.label("run"))
        .join(runs)
        .where(commands.c.state.in_((*OPEN, "proposed")), commands.c.expires < time.time())
    )
    rows = (await connection.execute(query.with_for_update())).all()
    held = await holdings(connection, {row.run_id for row in rows})
    tracks = await _tracks(connection, [row.id for row in rows])
    for row in rows:
        await _settle(store, connection, row, _concerned(row, held.get(row.run_id, {})), tracks.get(row.id, {}))


async def _pass_on(store: Store, connection: AsyncConnection, run_id: int, batch: Batch, switched: Switched) -> None:
    """What one rank did by itself, the other ranks that hold the heads are told; what it proposes, people are asked."""
    by_mode: dict[str, list[HeadRef]] = defaultdict(list)
    for ref, mode in zip(switched.heads, switched.after, strict=True):
        by_mode[mode].append(ref)
    actor = f"rank {batch.rank}"
    details: dict[str, Any] = {
        "outcome": switched.outcome,
        "step": switched.step,
        "heads": [list(ref) for ref in switched.heads[:64]],
    }
    details |= {"before": sorted(set(switched.before)), "after": sorted(by_mode), "reason": switched.reason}
    await audit.append(store, connection, actor=actor, action="local switch", run=batch.run, details=details)
    if switched.outcome not in ("applied", "proposed"):
        return
    ranks = (await holdings(connection, [run_id])).get(run_id, {})
    if batch.rank not in ranks or ranks[batch.rank].boot != batch.boot:
        return  # a superseded boot's news comes too late to be an order
    for mode, heads in sorted(by_mode.items()):
        name = f"{batch.run}|{batch.rank}|{switched.id}|{mode}"
        command_id = f"{switched.outcome}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        if (await connection.execute(select(commands.c.id).where(commands.c.id == command_id))).first():
            continue
        if switched.outcome == "applied":
            others = {r for r, h in ranks.items() if r != batch.rank and not h.finished and h.heads & set(heads)}
            if not others:
                continue
        elif await _already_proposed(connection, run_id, heads, mode):
            continue
        order = Order(
            run_id=run_id,
            run=batch.run,
            source="rank" if switched.outcome == "applied" else "agent",
            issued_by=actor,
            reason=switched.reason or "local decision",
            heads=heads,
            mode=mode,
            state="pending" if switched.outcome == "applied" else "proposed",
            expires=time.time() + 3600.0,
            id=command_id,
            answered_by=batch.rank if switched.outcome == "applied" else None,
        )
        await create(store, connection, order)


async def _already_proposed(connection: AsyncConnection, run_id: int, heads: list[HeadRef], mode: str) -> bool:
    query = select(commands.c.heads).where(
        commands.c.run_id == run_id, commands.c.state.in_(("proposed", *OPEN)), commands.c.mode == mode
    )
    wanted = {tuple(ref) for ref in heads}
    return any(
        row.heads is None or wanted <= {tuple(ref) for ref in row.heads} for row in await connection.execute(query)
    )


async def _tell(
    store: Store,
    connection: AsyncConnection,
    row: Row[Any],
    run: str,
    state: CommandState,
    actor: str,
    details: dict[str, Any],
) -> None:
    """The audit row and the event of a transition."""
    full = {**details, "state": state, "mode": row.mode, "heads": row.heads, "source": row.source}
    await audit.append(store, connection, actor=actor, action="command", run=run, command=row.id, details=full)
    change = CommandChange(
        id=row.id,
        state=state,
        source=row.source,
        issued_by=row.issued_by,
        reason=row.reason,
        heads=None if row.heads is None else [(layer, head) for layer, head in row.heads],
        mode=row.mode,
    )
    sentence = f"Command to switch {heads_in_words(change.heads)} to {row.mode} is {state} ({actor}): {row.reason}"
    await connection.execute(
        events.insert().values(
            run_id=row.run_id,
            kind="command",
            unix_seconds=time.time(),
            sentence=sentence,
            mode=row.mode,
            outcome=state,
            payload=change.model_dump_json(),
        )
    )


async def status(
    connection: AsyncConnection, run_id: int | None, command_id: str | None, limit: int
) -> list[CommandStatus]:
    """Commands of a run, newest first; or the one with the id."""
    query = select(commands, runs.c.name.label("run")).join(runs).order_by(desc(commands.c.number)).limit(limit)
    query = query.where(commands.c.id == command_id) if command_id else query.where(commands.c.run_id == run_id)
    rows = (await connection.execute(query)).all()
    tracks = await _tracks(connection, [row.id for row in rows])
    return [_status(row, tracks.get(row.id, {})) for row in rows]


def _status(row: Row[Any], track: dict[int, Row[Any]]) -> CommandStatus:
    fields = ("id", "run", "state", "source", "issued_by", "reason", "heads", "mode", "expect", "dry_run")
    answers = []
    for rank, state in sorted(track.items()):
        said = Switched.model_validate_json(state.switched) if state.switched else None
        answers.append(
            RankAnswer(
                rank=rank,
                deliveries=state.deliveries,
                outcome=state.outcome,
                step=said.step if said else None,
                heads=list(said.heads) if said else [],
                before=list(said.before) if said else [],
                after=list(said.after) if said else [],
                reason=said.reason if said else "",
            )
        )
    return CommandStatus.model_validate(
        {
            **{name: getattr(row, name) for name in fields},
            "created_unix_seconds": row.created,
            "expires_unix_seconds": row.expires,
            "expires_step": row.expires_step,
            "ranks": answers,
        }
    )


async def pending_by_run(connection: AsyncConnection) -> dict[int, int]:
    """How many commands of each run wait for an answer."""
    query = select(commands.c.run_id, func.count()).where(or_(*(commands.c.state == s for s in OPEN)))
    return {row.run_id: row[1] for row in await connection.execute(query.group_by(commands.c.run_id))}
