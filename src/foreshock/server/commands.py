"""Orders, from their request to the last rank's answer; every step is recorded in the audit trail.

Orders of people are always accepted. Automatic orders (from an agent, a rank's own switch, a webhook, or the
verification of a switch) go through the checks of `propose`. An open order is sent with every ack to each rank that has
one of its heads, until that rank has answered or the order has expired.
"""

import hashlib
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, desc, func, select, update

from foreshock.contract.causes import curable
from foreshock.contract.incident import heads_in_words
from foreshock.contract.modes import is_mode, mode_name, parse_mode
from foreshock.contract.orders import (
    OPEN,
    PEOPLE_MAY,
    TRANSITIONS,
    Decided,
    Order,
    OrderState,
    Transition,
    can_order,
    switches,
)
from foreshock.contract.wire import MAX_ACK_BYTES, Batch, Command, HeadRef, Switched
from foreshock.server.models import CommandRequest, CommandStatus, RankAnswer, SwitchedTo, SwitchPlan
from foreshock.server.problems import ProblemError
from foreshock.server.readings import passed_over, read_back
from foreshock.server.runs.current import active_warnings, find_run
from foreshock.server.runs.eventlog import heads_of, nobody_answers, order_in_words, printable, write_events
from foreshock.server.runs.incidents import carried_out, present, reject_evidence, rejected_heads
from foreshock.server.runs.ranks import Ranks, all_ended, concerned, described, heads_by_rank, nobody_left
from foreshock.server.settings import Settings
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import lock_runs
from foreshock.server.store.process_starts import BootKey
from foreshock.server.store.schema import command_ranks, commands, runs

WITH_RUN: Final = select(commands, runs.c.name.label("run")).join(runs)
"""Selects orders, each with the name of its run."""
_OUTSIDE: Final = ("alertmanager", "service")
"""Automatic sources of orders outside the training; they share the cool-down."""
_MOST_WAITING: Final = 64
"""Maximum number of automatic orders and proposals that wait in one run; nobody would read more."""
_ANSWER_GRACE_SECONDS: Final = 60.0
"""How long after its expiry a delivered command waits for an answer that may be in flight."""
_MAX_PER_ACK: Final = 256
_ACK_BYTES: Final = MAX_ACK_BYTES - 4096
"""Maximum bytes of the orders in one ack; the rest is for its other fields. An order that names every head fits."""
_STORED: Final = {column.name for column in commands.c} & Order.model_fields.keys()


def create(connection: Connection, run_id: int, order: Order, **more: Any) -> str:
    """Store an order with its audit row and event; return its id."""
    words = {"issued_by": printable(order.issued_by[:128]), "reason": printable(order.reason[:500])}
    own = {"id": f"cmd-{uuid.uuid4().hex}", "created": time.time(), "expires": order.expires_unix_seconds}
    values = order.model_dump(include=_STORED) | words | own | more
    connection.execute(commands.insert().values(run_id=run_id, **values))
    row = connection.execute(WITH_RUN.where(commands.c.id == own["id"])).one()
    what = f"Command to {order_in_words(row)} is {order.state} ({row.issued_by}): {row.reason}"
    record_transition(connection, row, order.state, order.issued_by, {"reason": order.reason[:500]}, what)
    return str(row.id)


def _move(
    connection: Connection,
    row: Row[Any],
    transition: str,
    actor: str,
    details: dict[str, Any],
    sentence: str | None = None,
    **values: Any,
) -> bool:
    """Move an order to its next state, with its audit row and event; False if another writer moved it first."""
    state = TRANSITIONS[row.state][transition]
    same = commands.c.id == row.id, commands.c.state == row.state
    if not connection.execute(update(commands).where(*same).values(state=state, **values)).rowcount:
        return False
    record_transition(connection, row, state, actor, details, sentence, **values)
    return True


def record_transition(
    connection: Connection,
    row: Row[Any],
    state: OrderState,
    actor: str,
    details: dict[str, Any],
    sentence: str | None = None,
    **changed: Any,
) -> None:
    """Write the audit row and the event of a transition or a verification. `changed`: new values for `row`."""
    full = {**details, "state": state, "mode": row.mode, "heads": row.heads, "source": row.source}
    audit.append(connection, actor=actor, action="command", run=row.run, command=row.id, details=full)
    news = Order.model_validate({**row._mapping, "verification": None, **changed, "state": state})
    own = {"run_id": row.run_id, "kind": "command", "mode": row.mode, "outcome": state}
    words = sentence or f"Command to {order_in_words(row)} is {state} ({printable(actor)})."
    written = {"unix_seconds": time.time(), "sentence": words, "payload": news.model_dump_json()}
    write_events(connection, [{**own, **written}])


# ---- orders and decisions of people ----------------------------------------------------------------------------------


def create_from_request(
    connection: Connection,
    run: str,
    request: CommandRequest,
    caller: str,
    idempotency_key: str | None,
    default_expiry_seconds: float,
) -> tuple[str, bool]:
    """Store a person's order, which is sent under every policy. Return its id, and whether it is new."""
    run_id = find_run(connection, run).id
    lock_runs(connection, [run_id])
    # A switch is hashed without its kind, which older clients do not send, so that their repeats match.
    said = request.model_dump_json(exclude={"action"} if request.action == "switch" else None)
    digest = hashlib.sha256(said.encode()).hexdigest()
    if idempotency_key is not None:
        same = (commands.c.run_id == run_id, commands.c.idempotency_key == idempotency_key)
        old = connection.execute(select(commands.c.id, commands.c.request_hash).where(*same)).first()
        if old is not None and old.request_hash != digest:
            raise ProblemError(409, "This Idempotency-Key was used for another command; take a new key.")
        if old is not None:
            return old.id, False
    if request.heads == []:
        raise ProblemError(422, "heads is empty; name at least one [layer, head], or send null for every head.")
    held = {ref for holding in _ranks(connection, run_id).values() for ref in holding.heads}
    if held and (unknown := [ref for ref in request.heads or () if ref not in held]):
        raise ProblemError(422, f"Run {run} has no {heads_in_words(unknown)}.")
    order = Order(
        **request.model_dump(include={"action", "heads", "reason", "expect", "dry_run", "expires_step"}),
        mode=request.mode or request.action,
        source="api",
        issued_by=f"{request.who} ({caller})",
        expires_unix_seconds=time.time() + (request.expires_in_seconds or default_expiry_seconds),
    )
    [made] = _ordered(connection, run_id, [order], idempotency_key=idempotency_key, request_hash=digest)
    return made, True


def _ordered(connection: Connection, run_id: int, orders: Sequence[Order], **stored: Any) -> Sequence[str]:
    """Store a person's orders and return their ids. Raises ProblemError if no active rank can carry them out."""
    gate = propose(connection, run_id, orders, **stored)
    if gate.why:
        raise ProblemError(409, gate.why)
    return gate.ids


def decide(connection: Connection, command_id: str, who: str, reason: str, *, how: Decided, expiry: float) -> list[str]:
    """Approve a proposed order for `expiry` seconds, reject it, or cancel an open one; return its id in a list.

    A rejection applies to the warnings that are active now (see `reject_evidence`). After a cancellation no further
    rank receives the order.
    """
    row = _decided(connection, command_id, how)
    values = {} if how == "cancel" else {"decided_by": printable(who)[:160], "decided": time.time()}
    if how == "approve":
        if not can_order(row.action, row.mode):
            raise ProblemError(409, f"Command {row.id} is for {row.mode}, which this service does not know; reject it.")
        if nobody_left(heads_of(row), _ranks(connection, row.run_id)):
            raise ProblemError(409, nobody_answers(row))
        values["expires"] = time.time() + expiry
    elif how == "reject":
        reject_evidence(connection, row.run_id, heads_of(row))
    verb = "approved" if how == "approve" else TRANSITIONS[row.state][how]
    what = f"{'Command' if how == 'cancel' else 'The proposal'} to {order_in_words(row)}"
    said = f"{what} is {verb} ({printable(who)}): {printable(reason)}"
    _move(connection, row, how, who, {"reason": reason}, said, **values)
    return [row.id]


def undo(
    connection: Connection, command_id: str, who: str, reason: str, *, dry_run: bool, expiry: float
) -> Sequence[str]:
    """Order the former modes of the heads that a switch changed, one order for each mode; return the orders' ids.

    A rank refuses such an order if its heads have another mode by then. Raises ProblemError if the switch was not
    applied by any rank, or if another order undoes it already.
    """
    row = _decided(connection, command_id, "undo")
    if other := _undone(connection, [command_id]).get(command_id):
        raise ProblemError(409, f"Command {command_id} was already undone by {other}.")
    done = carried_out(connection, commands.c.id == command_id)[command_id]
    former = {one.ref: one.before for one in reversed(done) if one.before != one.after == row.mode}
    if not former:
        raise ProblemError(409, f"Command {command_id} did not change a mode, so it cannot be undone.")
    orders = [
        Order(
            source="api",
            heads=sorted(ref for ref, before in former.items() if before == mode),
            mode=mode,
            issued_by=who,
            reason=f"undo: {reason}",
            expect=row.mode,
            dry_run=dry_run,
            expires_unix_seconds=time.time() + expiry,
            undoes=command_id,
        )
        for mode in sorted(set(former.values()))
    ]
    return _ordered(connection, row.run_id, orders)


def _decided(connection: Connection, command_id: str, how: Transition) -> Row[Any]:
    """Lock the run of an order and return its row. Raises ProblemError if its state does not allow the action `how`."""
    owners = connection.execute(select(commands.c.run_id).where(commands.c.id == command_id))
    lock_runs(connection, owners.scalars().all())
    row = connection.execute(WITH_RUN.where(commands.c.id == command_id)).first()
    if row is None:
        raise ProblemError(404, f"There is no command {command_id[:128]!r}.")
    can = [transition for transition in PEOPLE_MAY if transition in TRANSITIONS[row.state]]
    if how not in can:
        instead = f"you can {' or '.join(can)} it" if can else "it needs no action"
        raise ProblemError(409, f"Command {row.id} is {row.state}, so you cannot {how} it; {instead}.")
    return row


def _ranks(connection: Connection, run_id: int) -> Ranks:
    return heads_by_rank(connection, [run_id]).get(run_id, {})


# ---- the state of orders ---------------------------------------------------------------------------------------------


def plan(connection: Connection, run_id: int, wanted: str) -> SwitchPlan:
    """Return what an order of `wanted` for every head changes: each head gets it added, but plain removes all modes."""
    here, _ = present(connection, run_id)
    found = switches(here, here, wanted) if parse_mode(wanted) else {}
    changes = [SwitchedTo(mode=mode_name(mode), heads=heads) for mode, heads in found.items()]
    changed = {ref for heads in found.values() for ref in heads}
    unchanged = [ref for ref, mode in sorted(here.items()) if ref not in changed and mode_name(mode) != wanted]
    if not parse_mode(wanted) or (not unchanged and all(each.mode == wanted for each in changes)):
        return SwitchPlan(changes=[SwitchedTo(mode=wanted, heads=None)], unchanged=[])
    return SwitchPlan(changes=changes, unchanged=unchanged)


def _undone(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """For each of these commands that is undone, or about to be, return the id of the command that undoes it."""
    in_force = commands.c.state.in_((*OPEN, "applied"))
    query = select(commands.c.undoes, commands.c.id).where(commands.c.undoes.in_(ids), in_force, ~commands.c.dry_run)
    return {row.undoes: row.id for row in connection.execute(query)}


def _tracks_of(connection: Connection, ids: Sequence[str]) -> dict[str, dict[int, Row[Any]]]:
    """Return the rows of `command_ranks` by command and rank."""
    tracks: dict[str, dict[int, Row[Any]]] = defaultdict(dict)
    for row in connection.execute(select(command_ranks).where(command_ranks.c.command_id.in_(ids))):
        tracks[row.command_id][row.rank] = row
    return tracks


def _answer_of(track: Row[Any]) -> Switched | None:
    """Return a rank's answer to a command; None if it has not answered, or if the row cannot be read."""
    if not track.switched:
        return None
    return read_back(Switched, track.switched, "answer", (track.command_id, track.rank))


def status(connection: Connection, run_id: int | None, command_id: str | None, limit: int) -> list[CommandStatus]:
    """Return the commands of a run, newest first, or the one with this id."""
    query = WITH_RUN.order_by(desc(commands.c.number)).limit(limit)
    query = query.where(commands.c.id == command_id) if command_id else query.where(commands.c.run_id == run_id)
    rows = connection.execute(query).all()
    ids = [row.id for row in rows]
    tracks, undone = _tracks_of(connection, ids), _undone(connection, ids)
    return [_status(row, tracks.get(row.id, {}), undone.get(row.id)) for row in rows]


def _status(row: Row[Any], track: dict[int, Row[Any]], undone_by: str | None) -> CommandStatus:
    answers = []
    for rank, state in sorted(track.items()):
        switched = _answer_of(state)
        words = switched.model_dump(include={"step", "heads", "before", "after", "reason"}) if switched else {}
        answers.append(RankAnswer(rank=rank, deliveries=state.deliveries, outcome=state.outcome, **words))
    ended = row.state == "refused" and not any(answer.outcome == "refused" for answer in answers)
    own = {"ranks": answers, "closed_because": nobody_answers(row) if ended else None, "undone_by": undone_by}
    return CommandStatus.model_validate({**row._mapping, **own, "what": order_in_words(row)})


def pending_by_run(connection: Connection) -> dict[int, int]:
    """Count the commands of each run that wait for an answer."""
    query = select(commands.c.run_id, func.count()).where(commands.c.state.in_(OPEN))
    return {row.run_id: row[1] for row in connection.execute(query.group_by(commands.c.run_id))}


def not_arrested_by_run(connection: Connection) -> dict[int, int]:
    """Count the switches of each run that did not arrest their heads and were neither undone nor replaced since."""
    applied = select(commands).where(commands.c.state == "applied", commands.c.action == "switch")
    failed = connection.execute(applied.where(commands.c.verification == "not arrested")).all()
    if not failed:
        return {}
    rows = connection.execute(applied.where(commands.c.run_id.in_({row.run_id for row in failed}))).all()
    found: Counter[int] = Counter()
    for row in failed:
        since = (other for other in rows if other.run_id == row.run_id and other.number > row.number)
        if not any(other.undoes == row.id or _share_heads(other, row) for other in since):
            found[row.run_id] += 1
    return found


def _share_heads(one: Row[Any], other: Row[Any]) -> bool:
    """Whether two orders have a head in common; an order without heads applies to every head."""
    return None in (one.heads, other.heads) or any(ref in other.heads for ref in one.heads)


# ---- automatic orders ------------------------------------------------------------------------------------------------


class Gate(NamedTuple):
    """The result of `propose`: the ids of the stored orders, or the reason why none was stored."""

    result: Literal["ordered", "proposed", "observed", "refused"]
    why: str = ""
    ids: Sequence[str] = ()


def changes_for(
    connection: Connection, run_id: int, order: Order, called_for: Collection[HeadRef], scope: str = "head"
) -> list[Order]:
    """Return orders that add the mitigation of `order` to the heads in `called_for`, one for each resulting mode.

    Heads from which a person removed a mitigation are left out. A mode of another version is ordered unchanged.
    """
    if not is_mode(order.mode):
        return [order.model_copy(update={"heads": sorted(called_for)})]
    modes, held = present(connection, run_id)
    allowed = set(called_for) - rejected_heads(connection, run_id)
    changes = switches(allowed, modes, order.mode, scope, held)
    return [order.model_copy(update={"mode": mode_name(mode), "heads": heads}) for mode, heads in changes.items()]


def propose(
    connection: Connection,
    run_id: int,
    orders: Sequence[Order],
    called_for: Collection[tuple[int | None, int | None]] = (),
    cooldown_seconds: float = 0.0,
    **stored: Any,
) -> Gate:
    """Store `orders`, all of one source and state, to be sent or to wait for a person, unless a rule forbids it.

    The caller has locked the run. Orders of people are always accepted. If a person rejected or undid a switch, no
    automatic order repeats it until one of the heads in `called_for` has a new warning. cooldown_seconds: the pause
    after an order of the service or of a webhook, before the next one. stored: values of further columns.
    """
    until = "which holds until one of these heads has a new warning"
    source, state = next(((one.source, one.state) for one in orders), (None, None))
    asks = source != "api" and not (source == "rank" and state == "pending")
    if called_for and asks and set(called_for) <= rejected_heads(connection, run_id):
        return Gate("observed", f"a person rejected this switch, {until}")
    if not orders:
        taken = f"a person undid the switch of these heads, {until}" if called_for else "its heads are switched"
        return Gate("observed", taken)
    if strange := [one.mode for one in orders if not can_order(one.action, one.mode)]:
        return Gate("refused", f"this service does not know {strange[0]}; it may be older than what reported it")
    named = [one.heads for one in orders if one.heads is not None]
    heads = sorted(ref for own in named for ref in own)
    all_of_them = heads if len(named) == len(orders) else None
    if source in ("api", *_OUTSIDE) and nobody_left(all_of_them, _ranks(connection, run_id)):
        return Gate("refused", nobody_answers(orders[0].model_copy(update={"heads": all_of_them})))
    if asks and (why := _in_the_way(connection, run_id, set(heads), cooldown_seconds)):
        return Gate("refused", why)
    ids = [create(connection, run_id, one, **stored) for one in orders]
    return Gate("ordered" if state == "pending" else "proposed", ids=ids)


def _in_the_way(connection: Connection, run_id: int, heads: set[HeadRef], cooldown: float) -> str | None:
    """Return why an automatic switch of these heads is not allowed now, or None if it is.

    Only the cool-down and open orders count; a finished order does not prevent another one.
    """
    now, mine = time.time(), commands.c.run_id == run_id
    # An order far in the future was created by a wrong clock, not by another replica's, and does not count.
    lately = commands.c.created > now - cooldown, commands.c.created <= now + cooldown
    ours = mine, commands.c.source.in_(_OUTSIDE), commands.c.state != "rejected", *lately
    last = connection.execute(select(func.max(commands.c.created)).where(*ours)).scalar()
    if cooldown and last is not None:
        return f"the run's cool-down lasts {cooldown - (now - last):.0f} s more"
    waiting = select(commands).where(mine, commands.c.state.in_((*OPEN, "proposed")), ~commands.c.dry_run)
    rows = connection.execute(waiting.where(commands.c.action == "switch")).all()
    for row in rows:
        named = heads if row.heads is None else set(heads_of(row) or ())
        if row.state == "proposed" and heads <= named:
            return "a proposal for these heads waits for approval"
        if row.state != "proposed" and not named.isdisjoint(heads):
            return "a command for these heads is in progress"
    machines = sum(row.source != "api" for row in rows)
    return f"{machines} automatic orders wait already" if machines >= _MOST_WAITING else None


def _pass_on(
    connection: Connection,
    run_id: int,
    ranks: Ranks,
    batch: Batch,
    some: Sequence[Switched],
) -> None:
    """Record what a rank switched or proposed, and order or propose the same for the other ranks with these heads.

    ranks: the heads of each rank. some: switches of one batch with the same outcome, all with a warning or all without.
    They become one order, because each order costs the writer a dozen statements.
    """
    before: dict[HeadRef, str] = {}
    after: dict[HeadRef, str] = {}
    for one in some:
        before = dict(zip(one.heads, one.before, strict=True)) | before
        after |= dict(zip(one.heads, one.after, strict=True))
    reason = some[0].reason if len(some) < 2 else f"{some[0].reason} ({len(some)} switches)"[-500:]
    modes = {"heads": tuple(after), "before": tuple(before[ref] for ref in after), "after": tuple(after.values())}
    switched = some[0].model_copy(update={**modes, "step": max(one.step for one in some), "reason": reason})
    verdicts = {one.verdict for one in some}
    actor, own = f"rank {batch.rank}", ranks.get(batch.rank)
    audit.append(connection, actor=actor, action="local switch", run=batch.run, details=_details_of(switched))
    if switched.outcome not in ("applied", "proposed") or own is None or own.boot != batch.boot:
        return  # a superseded process must not cause an order
    changes: dict[str, list[HeadRef]] = defaultdict(list)
    for ref, mode in zip(switched.heads, switched.after, strict=True):
        if ref in own.heads and is_mode(mode):  # an unknown mode of a newer agent is only recorded
            changes[mode].append(ref)
    named = [verdict for verdict in verdicts if verdict is not None]
    raised = active_warnings(connection, [run_id], named).get(run_id, []) if named else []
    applied = switched.outcome == "applied"
    active = {w.id for w in raised if w.rank == batch.rank and curable(w.cause) and w.severity != "info"}
    justified = applied and verdicts <= active and _is_of_policy(connection, run_id, switched)
    asks = bool(concerned(switched.heads, ranks) - {batch.rank}) or not applied
    orders = [
        Order(
            heads=heads,
            mode=mode,
            state="applied" if not asks else "pending" if justified else "proposed",
            source="rank" if applied else "agent",
            issued_by=actor,
            reason=switched.reason or "local decision",
            expires_unix_seconds=time.time() + Settings.command_expiry_seconds,
        )
        for mode, heads in changes.items()
    ]
    if asks:
        made = propose(connection, run_id, orders, {(one.layer, one.head) for one in raised}).ids
    else:
        made = [create(connection, run_id, order) for order in orders]
    if applied:
        answer = {"outcome": "applied", "switched": switched.model_dump_json(), "rank": batch.rank, "boot": batch.boot}
        for command_id in made:
            connection.execute(command_ranks.insert().values(command_id=command_id, deliveries=0, **answer))


def _is_of_policy(connection: Connection, run_id: int, switched: Switched) -> bool:
    """Whether a rank's switch follows the run's policy: every active process has the policy auto and the same
    mitigation, and this mitigation results in the modes that the rank gave its heads."""
    newest = process_starts.newest(process_starts.of_now(connection, [run_id])[run_id]).values()
    living = [described([one]) for one in newest if one.finished_status is None]
    mitigations = {one.get("mitigation") for one in living}
    mitigation = next(iter(mitigations), None)
    if {one.get("policy") for one in living} != {"auto"} or len(mitigations) != 1 or not mitigation:
        return False
    if not all(is_mode(mode) for mode in (mitigation, *switched.before)):
        return False
    before = {ref: int(parse_mode(mode)) for ref, mode in zip(switched.heads, switched.before, strict=True)}
    called_for = {ref: mode_name(mode) for mode, heads in switches(before, before, mitigation).items() for ref in heads}
    return called_for == dict(zip(switched.heads, switched.after, strict=True))


# ---- delivery with acks, and answers ---------------------------------------------------------------------------------

_OPEN_ORDERS: Final = WITH_RUN.where(
    commands.c.run_id.in_(bindparam("run_ids", expanding=True)), commands.c.state.in_(OPEN)
).order_by(commands.c.number)
Orders = dict[BootKey, tuple[Command, ...]]
"""The commands for each boot, by (run, rank, boot)."""


def exchange(
    connection: Connection,
    run_ids: Mapping[str, int],
    switched: Sequence[tuple[Batch, Switched]],
    group: Sequence[Batch],
) -> Orders:
    """Process the answers in a group of batches, and return the commands for each boot.

    The caller has locked the runs (`lock_runs`).
    """
    switched_runs = {run_ids[batch.run] for batch, _ in switched}
    held = heads_by_rank(connection, switched_runs) if switched_runs else {}
    alike: dict[tuple[int, str, bool], list[tuple[Batch, Switched]]] = defaultdict(list)
    for batch, answer in switched:
        if answer.command is not None:
            _answer(connection, run_ids[batch.run], held[run_ids[batch.run]], batch, answer)
        else:
            alike[id(batch), answer.outcome, answer.verdict is None].append((batch, answer))
    for some in alike.values():
        batch, run_id = some[0][0], run_ids[some[0][0].run]
        _pass_on(connection, run_id, held.get(run_id, {}), batch, [answer for _, answer in some])
    rows = connection.execute(_OPEN_ORDERS, {"run_ids": sorted(set(run_ids.values()))}).all()
    if not rows:
        return {}
    held |= heads_by_rank(connection, {row.run_id for row in rows} - switched_runs)
    tracks = _tracks_of(connection, [row.id for row in rows])
    orders: dict[BootKey, list[Command]] = defaultdict(list)
    sizes: Counter[BootKey] = Counter()
    here, now = {(batch.run, batch.rank, batch.boot) for batch in group}, time.time()
    for row in rows:
        ranks, track = held.get(row.run_id, {}), tracks.get(row.id, {})
        if _settle(connection, row, ranks, track) or not can_order(row.action, row.mode):
            continue
        for rank in sorted(concerned(heads_of(row), ranks)):
            key, state = (row.run, rank, ranks[rank].boot), track.get(rank)
            answered = state is not None and state.outcome is not None
            late = row.expires is not None and now > row.expires and state is None
            if key not in here or answered or late or len(orders[key]) >= _MAX_PER_ACK:
                continue
            if (order := _as_wire(row)) is not None:
                sizes[key] += len(order.model_dump_json().encode()) + 1
                if sizes[key] <= _ACK_BYTES:  # else it is sent with a later ack, when earlier ones are answered
                    orders[key].append(order)
                    _delivered(connection, row, rank, state)
    return {key: tuple(value) for key, value in orders.items()}


def _as_wire(row: Row[Any]) -> Command | None:
    try:
        same = {name: getattr(row, name) for name in Command.model_fields.keys() & row._fields}
        return Command.model_validate(same | {"heads": heads_of(row), "expires_unix_seconds": row.expires})
    except ValidationError as error:
        passed_over("command", row.id, error.errors(include_url=False, include_input=False)[0]["msg"])
        return None


def _delivered(connection: Connection, row: Row[Any], rank: int, track: Row[Any] | None) -> None:
    if track is not None:
        again = update(command_ranks).where(_track(row.id, rank))
        connection.execute(again.values(deliveries=track.deliveries + 1))
        return
    connection.execute(command_ranks.insert().values(command_id=row.id, rank=rank, deliveries=1))
    if row.state != "pending" or not _move(connection, row, "deliver", "service", {"rank": rank}):
        details = {"rank": rank, "state": "delivered"}
        audit.append(connection, actor="service", action="command", run=row.run, command=row.id, details=details)


def _track(command_id: str, rank: int) -> ColumnElement[bool]:
    return and_(command_ranks.c.command_id == command_id, command_ranks.c.rank == rank)


def _answer(connection: Connection, run_id: int, ranks: Ranks, batch: Batch, switched: Switched) -> None:
    asked = WITH_RUN.where(commands.c.id == switched.command, commands.c.run_id == run_id)
    row = connection.execute(asked).first()
    if row is None or switched.outcome == "proposed":
        return
    own, actor, details = ranks.get(batch.rank), f"rank {batch.rank}", {"rank": batch.rank, **_details_of(switched)}
    if own is None or own.boot != batch.boot:  # the newest process has not answered, and may lack this switch
        former, details = f"{actor}, a former process", details | {"process_start": batch.boot}
        audit.append(connection, actor=former, action="answer", run=row.run, command=row.id, details=details)
        return
    values = {"outcome": switched.outcome, "switched": switched.model_dump_json(), "boot": batch.boot}
    track = connection.execute(select(command_ranks).where(_track(row.id, batch.rank))).first()
    if track is None:
        connection.execute(command_ranks.insert().values(command_id=row.id, rank=batch.rank, deliveries=0, **values))
    elif track.outcome is None:
        connection.execute(update(command_ranks).where(_track(row.id, batch.rank)).values(values))
    else:
        return
    audit.append(connection, actor=actor, action="answer", run=row.run, command=row.id, details=details)
    if row.state not in (*OPEN, "cancelled"):
        _settle(connection, row, ranks, _tracks_of(connection, [row.id]).get(row.id, {}))


def _details_of(switched: Switched) -> dict[str, Any]:
    """Return the details of a rank's switch for its audit row, with at most 64 heads."""
    return {
        **switched.model_dump(include={"outcome", "step", "reason"}),
        "heads": [list(ref) for ref in switched.heads[:64]],
        "before": sorted(set(switched.before)),
        "after": sorted(set(switched.after)),
    }


def _settle(connection: Connection, row: Row[Any], ranks: Ranks, track: Mapping[int, Row[Any]]) -> bool:
    """Close a command that is answered, has expired, or whose ranks have all ended. Return whether it is closed."""
    heads, now = heads_of(row), time.time()
    outcomes = {rank: t.outcome for rank, t in sorted(track.items()) if t.outcome is not None and rank in ranks}
    silent = sorted(concerned(heads, ranks) - outcomes.keys())
    in_flight = any(rank in track for rank in silent) and now < (row.expires or 0) + _ANSWER_GRACE_SECONDS
    details: dict[str, Any] = {"outcomes": {str(rank): one for rank, one in outcomes.items()}, "silent": silent}
    state, ends = "", ""
    if outcomes and not silent:
        state = next((one for one in ("refused", "expired", "dry_run") if one in outcomes.values()), "applied")
        answers = [_answer_of(t) for t in track.values()] if state == "applied" else []
        if steps := [one.step for one in answers if one is not None and one.outcome == "applied"]:
            ends = f" at step {max(steps):,}."
    elif row.expires is not None and now > row.expires and not in_flight:
        state = "expired"
        some = ", ".join(map(str, silent[:16])) + (" and more" if len(silent) > 16 else "")
        ends = f"; no answer from rank{'s' if len(silent) > 1 else ''} {some}: {row.reason}" if silent else ""
    elif row.state in OPEN and all_ended(heads, ranks):
        state, details["because"] = "refused", nobody_answers(row)
        ends = f": {details['because']}" if not outcomes else ""
    if state not in ("", row.state):
        what = f"Command to {order_in_words(row)} is {state}{ends}"
        _move(connection, row, state, "service", details, what if ends else None)
    return bool(state)


def expire(connection: Connection) -> None:
    """Close expired commands. Called periodically, because silent runs send no batch that would close them."""
    overdue = commands.c.state.in_((*OPEN, "proposed")), commands.c.expires < time.time()
    owners = set(connection.execute(select(commands.c.run_id).where(*overdue)).scalars())
    lock_runs(connection, owners)
    rows = connection.execute(WITH_RUN.where(*overdue, commands.c.run_id.in_(owners))).all()
    held = heads_by_rank(connection, {row.run_id for row in rows})
    tracks = _tracks_of(connection, [row.id for row in rows])
    for row in rows:
        _settle(connection, row, held.get(row.run_id, {}), tracks.get(row.id, {}))
