"""Orders: made, decided, undone and shown, each step audited; and the one gate through which machines order.

Webhooks, the verdict on a switch and switches that ranks pass on `propose`. People may always order.
"""

import hashlib
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Connection, Row, delete, desc, func, or_, select, update

from foreshock.contract.modes import is_mode, mode_name, parse_mode
from foreshock.contract.orders import OPEN, PEOPLE_MAY, Decided, switches
from foreshock.contract.wire import Batch, HeadRef, Switched
from foreshock.server.models import (
    CommandChange,
    CommandRequest,
    CommandState,
    CommandStatus,
    RankAnswer,
    SwitchedTo,
    SwitchPlan,
    Verification,
)
from foreshock.server.problems import ProblemError
from foreshock.server.runs.eventlog import (
    ended_before_the_answer,
    heads_in_words,
    heads_of,
    order_in_words,
    printable,
    write_events,
)
from foreshock.server.runs.incidents import present, reject_evidence, rejected_heads
from foreshock.server.runs.listing import find_run
from foreshock.server.runs.newest import Ranks, heads_by_rank, nobody_left
from foreshock.server.store import audit
from foreshock.server.store.database import insert_or_ignore, lock_runs
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import command_ranks, commands, runs, webhook_alerts


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
    unchanged = [ref for ref, mode in sorted(here.items()) if ref not in changed and mode_name(mode) != wanted]
    if not parse_mode(wanted) or (not unchanged and all(each.mode == wanted for each in changes)):
        return SwitchPlan(changes=[SwitchedTo(mode=wanted, heads=None)], unchanged=[])
    return SwitchPlan(changes=changes, unchanged=unchanged)


def check_heads(run: str, heads: Sequence[HeadRef], ranks: Ranks) -> None:
    """Raises ProblemError for an order of no heads, or of heads that no rank ever held."""
    if not heads:
        raise ProblemError(422, "heads is empty; name at least one [layer, head], or give null for every head.")
    held: set[HeadRef] = set()
    for holding in ranks.values():
        held |= holding.heads
    unknown = [ref for ref in heads if ref not in held]
    if held and unknown:
        raise ProblemError(422, f"Run {run} has no {heads_in_words(unknown)}.")


def check_somebody_is_left(run: str, heads: Sequence[HeadRef] | None, ranks: Ranks) -> None:
    """Raises ProblemError for an order that nobody can carry out: it would stand until it expires, and people wait."""
    if not nobody_left(heads, ranks):
        return
    named = heads_in_words(heads)
    who = f"Run {run} has ended, and nobody is left to switch {named}"
    if not all(holding.finished for holding in ranks.values()):
        who = f"Every rank of run {run} that holds {named} has ended, and nobody is left to switch it"
    raise ProblemError(409, f"{who}. Order it again when the run is resumed.")


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
    answered: tuple[Batch, Switched] | None = None
    """The batch of the rank that has it already, and what it did, when a local switch is passed on."""
    undoes: str | None = None


WITH_RUN: Final = select(commands, runs.c.name.label("run")).join(runs)
"""Commands, each with the name of its run."""
_OF_ORDER: Final = {field.name for field in fields(Order)} & {column.name for column in commands.c}
"""What a command is stored with as its order has it, but for what `create` words anew."""


def create(connection: Connection, order: Order) -> str:
    """Create a command with its audit row and event; its id."""
    command_id = order.id or f"cmd-{uuid.uuid4().hex}"
    heads = None if order.heads is None else [list(ref) for ref in order.heads]
    words = {"issued_by": printable(order.issued_by[:128]), "reason": printable(order.reason[:500])}
    own = {"id": command_id, "heads": heads, "created": time.time()}
    connection.execute(commands.insert().values({**{c: getattr(order, c) for c in _OF_ORDER}, **words, **own}))
    if order.answered is not None:
        batch, switched = order.answered
        answer = {"outcome": "applied", "switched": switched.model_dump_json(), "rank": batch.rank, "boot": batch.boot}
        connection.execute(command_ranks.insert().values(command_id=command_id, deliveries=0, **answer))
    row = connection.execute(select(commands).where(commands.c.id == command_id)).one()
    what = f"Command to {order_in_words(row.mode, heads_of(row))} is {order.state} ({row.issued_by}): {row.reason}"
    record_transition(connection, row, order.run, order.state, order.issued_by, {"reason": order.reason[:500]}, what)
    return command_id


def create_from_request(
    connection: Connection,
    run: str,
    request: CommandRequest,
    caller: str,
    idempotency_key: str | None,
    default_expiry_seconds: float,
) -> tuple[str, bool]:
    """A person's command: goes out under every policy. Its id, and whether it is new."""
    run_id = find_run(connection, run).id
    lock_runs(connection, [run_id])
    digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    if idempotency_key is not None:
        same = (commands.c.run_id == run_id, commands.c.idempotency_key == idempotency_key)
        old = connection.execute(select(commands.c.id, commands.c.request_hash).where(*same)).first()
        if old is not None and old.request_hash != digest:
            raise ProblemError(409, "This Idempotency-Key was used for another command; take a new key.")
        if old is not None:
            return old.id, False
    ranks = heads_by_rank(connection, [run_id]).get(run_id, {})
    if request.heads is not None:
        check_heads(run, request.heads, ranks)
    check_somebody_is_left(run, request.heads, ranks)
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
    return create(connection, order), True


_TO: Final[dict[Decided, tuple[CommandState, str]]] = {
    "approve": ("pending", "approved"),
    "reject": ("rejected", "rejected"),
    "cancel": ("cancelled", "cancelled"),
}


def decide(connection: Connection, command_id: str, who: str, reason: str, *, how: Decided, expiry: float) -> list[str]:
    """Let a proposed command go out for `expiry` seconds, turn it down, which holds for the warnings that stand (see
    `reject_evidence`), or stop one that is under way, so that no further rank gets it. Its id.
    """
    row = _command(connection, command_id)
    heads, (state, verb) = heads_of(row), _TO[how]
    _check_state(row, how)
    values: dict[str, Any] = {"decided_by": printable(who)[:160], "decided": time.time()}
    details: dict[str, Any] = {"reason": reason, "decided": True}
    if how == "approve":
        if not is_mode(row.mode):
            raise ProblemError(409, f"Command {row.id} is for {row.mode}, which this service cannot order; reject it.")
        check_somebody_is_left(row.run, heads, heads_by_rank(connection, [row.run_id]).get(row.run_id, {}))
        values["expires"] = time.time() + expiry
    elif how == "reject":
        reject_evidence(connection, row.run_id, heads)
    else:
        track = tracks_of(connection, [command_id]).get(command_id, {})
        answered = sorted(rank for rank in track if track[rank].outcome)
        values, details = {}, {"reason": reason, "delivered_to": sorted(track), "answered": answered}
    what = f"{'Command' if how == 'cancel' else 'The proposal'} to {order_in_words(row.mode, heads)}"
    move(connection, row, state, who, details, f"{what} is {verb} ({printable(who)}): {printable(reason)}", **values)
    return [row.id]


def _check_state(row: Row[Any], how: Decided | Literal["undo"]) -> None:
    """Raises ProblemError unless a command in this state can be decided so."""
    if how not in (can := PEOPLE_MAY.get(row.state, ())):
        instead = f"you can {' or '.join(can)} it" if can else "there is nothing to do"
        raise ProblemError(409, f"Command {row.id} is {row.state}, so you cannot {how} it; {instead}.")


def move(
    connection: Connection,
    row: Row[Any],
    state: CommandState,
    actor: str,
    details: dict[str, Any],
    sentence: str | None = None,
    **values: Any,
) -> bool:
    """Bring a command into a state, with its audit row and event; False where it has moved on meanwhile."""
    same = commands.c.id == row.id, commands.c.state == row.state
    if not connection.execute(update(commands).where(*same).values(state=state, **values)).rowcount:
        return False
    record_transition(connection, row, row.run, state, actor, details, sentence)
    return True


def undo(connection: Connection, command_id: str, who: str, reason: str, *, dry_run: bool, expiry: float) -> list[str]:
    """Order the modes back that a command changed: one order for each former mode; their ids.

    Each is refused by a rank whose heads have another mode by then. Raises ProblemError unless the command was applied,
    wholly or by some ranks before it was cancelled, and nothing takes it back yet.
    """
    row = _command(connection, command_id)
    _check_state(row, "undo")
    if other := _undone(connection, [command_id]).get(command_id):
        raise ProblemError(409, f"Command {command_id} is undone by {other} already.")
    own = frozenset(heads_of(row) or ())
    former: dict[HeadRef, str] = {}
    for _, track in sorted(tracks_of(connection, [command_id]).get(command_id, {}).items()):
        switched = answer_of(track)
        if switched is not None and switched.outcome == "applied":
            for ref, before, after in zip(switched.heads, switched.before, switched.after, strict=True):
                if before != after == row.mode and (row.heads is None or ref in own):
                    former.setdefault(ref, before)
    if not former:
        raise ProblemError(409, f"Command {command_id} changed no mode; there is nothing to undo.")
    if strange := [before for before in former.values() if not is_mode(before)]:
        raise ProblemError(
            409,
            f"The mode before command {command_id} was {strange[0]}, which this service cannot order.",
        )
    ranks = heads_by_rank(connection, [row.run_id]).get(row.run_id, {})
    check_somebody_is_left(row.run, sorted(former), ranks)
    by_mode: dict[str, list[HeadRef]] = defaultdict(list)
    for ref, before in sorted(former.items()):
        by_mode[before].append(ref)
    order = Order(
        run_id=row.run_id,
        run=row.run,
        source="api",
        issued_by=who,
        reason=f"undo: {reason}",
        heads=None,
        mode="",
        expect=row.mode,
        dry_run=dry_run,
        expires=time.time() + expiry,
        undoes=command_id,
    )
    back = [replace(order, heads=heads, mode=mode) for mode, heads in sorted(by_mode.items())]
    return [create(connection, one) for one in back]


def _undone(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """For each command that is taken back, or about to be, the command that does so."""
    standing = commands.c.state.in_((*OPEN, "applied"))
    query = select(commands.c.undoes, commands.c.id).where(commands.c.undoes.in_(ids), standing, ~commands.c.dry_run)
    return {row.undoes: row.id for row in connection.execute(query)}


def _command(connection: Connection, command_id: str) -> Row[Any]:
    owners = connection.execute(select(commands.c.run_id).where(commands.c.id == command_id))
    lock_runs(connection, owners.scalars().all())
    row = connection.execute(WITH_RUN.where(commands.c.id == command_id)).first()
    if row is None:
        raise ProblemError(404, f"There is no command {command_id[:128]!r}.")
    return row


def tracks_of(connection: Connection, ids: Sequence[str]) -> dict[str, dict[int, Row[Any]]]:
    """For each command, where it stands with each rank that it went to."""
    tracks: dict[str, dict[int, Row[Any]]] = defaultdict(dict)
    for row in connection.execute(select(command_ranks).where(command_ranks.c.command_id.in_(ids))):
        tracks[row.command_id][row.rank] = row
    return tracks


def answer_of(track: Row[Any]) -> Switched | None:
    """How a rank answered a command; None before it has."""
    if not track.switched:
        return None
    return read_back(Switched, track.switched, "answer", (track.command_id, track.rank))


def details_of(switched: Switched) -> dict[str, Any]:
    """What a rank did, as its audit row has it; at most 64 heads by name."""
    return {
        "outcome": switched.outcome,
        "step": switched.step,
        "heads": [list(ref) for ref in switched.heads[:64]],
        "before": sorted(set(switched.before)),
        "after": sorted(set(switched.after)),
        "reason": switched.reason,
    }


def record_transition(
    connection: Connection,
    row: Row[Any],
    run: str,
    state: CommandState,
    actor: str,
    details: dict[str, Any],
    sentence: str | None = None,
    verification: Verification | None = None,
) -> None:
    """The audit row and the event of a transition, or of what became of the heads."""
    full = {**details, "state": state, "mode": row.mode, "heads": row.heads, "source": row.source}
    audit.append(connection, actor=actor, action="command", run=run, command=row.id, details=full)
    change = CommandChange(
        id=row.id,
        state=state,
        source=row.source,
        issued_by=row.issued_by,
        reason=row.reason,
        heads=row.heads,
        mode=row.mode,
        verification=verification,
    )
    if sentence is None:
        sentence = f"Command to {order_in_words(row.mode, change.heads)} is {state} ({printable(actor)})."
    own = {"run_id": row.run_id, "kind": "command", "mode": row.mode, "outcome": state}
    written = {"unix_seconds": time.time(), "sentence": sentence, "payload": change.model_dump_json()}
    write_events(connection, [{**own, **written}])


def status(connection: Connection, run_id: int | None, command_id: str | None, limit: int) -> list[CommandStatus]:
    """Commands of a run, newest first; or the one with the id."""
    query = WITH_RUN.order_by(desc(commands.c.number)).limit(limit)
    query = query.where(commands.c.id == command_id) if command_id else query.where(commands.c.run_id == run_id)
    rows = connection.execute(query).all()
    ids = [row.id for row in rows]
    tracks, undone = tracks_of(connection, ids), _undone(connection, ids)
    return [_status(row, tracks.get(row.id, {}), undone.get(row.id)) for row in rows]


def _status(row: Row[Any], track: dict[int, Row[Any]], undone_by: str | None) -> CommandStatus:
    same = CommandStatus.model_fields.keys() & row._fields
    answers = []
    for rank, state in sorted(track.items()):
        switched = answer_of(state)
        words = switched.model_dump(include={"step", "heads", "before", "after", "reason"}) if switched else {}
        answers.append(RankAnswer(rank=rank, deliveries=state.deliveries, outcome=state.outcome, **words))
    ended = row.state == "refused" and not any(answer.outcome == "refused" for answer in answers)
    return CommandStatus.model_validate(
        {
            **{name: getattr(row, name) for name in same},
            "created_unix_seconds": row.created,
            "expires_unix_seconds": row.expires,
            "ranks": answers,
            "closed_because": ended_before_the_answer(heads_of(row)) if ended else None,
            "undone_by": undone_by,
        }
    )


def pending_by_run(connection: Connection) -> dict[int, int]:
    """How many commands of each run wait for an answer."""
    query = select(commands.c.run_id, func.count()).where(or_(*(commands.c.state == s for s in OPEN)))
    return {row.run_id: row[1] for row in connection.execute(query.group_by(commands.c.run_id))}


def not_arrested_by_run(connection: Connection) -> dict[int, int]:
    """How many switches of each run stand that did not arrest their heads: neither undone nor replaced since."""
    applied = select(commands).where(commands.c.state == "applied")
    failed = connection.execute(applied.where(commands.c.verification == "not arrested")).all()
    if not failed:
        return {}
    rows = connection.execute(applied.where(commands.c.run_id.in_({row.run_id for row in failed}))).all()
    found: Counter[int] = Counter()
    for row in failed:
        since = [other for other in rows if other.run_id == row.run_id and other.number > row.number]
        if not any(other.undoes == row.id or _share_heads(other.heads, row.heads) for other in since):
            found[row.run_id] += 1
    return found


def _share_heads(one: list[list[int]] | None, other: list[list[int]] | None) -> bool:
    """None stands for every head."""
    return one is None or other is None or any(ref in other for ref in one)


_COOLED: Final = ("alertmanager", "service")
_REMEMBERED_SECONDS: Final = 7 * 86_400.0
_MOST_WAITING: Final = 64
"""Orders and proposals of machines that wait in one run: nobody reads more."""


class Gate(NamedTuple):
    """What became of the wish of a machine for a switch: ordered, proposed, or why not."""

    result: Literal["ordered", "proposed", "observed", "refused", "duplicate"]
    why: str = ""
    heads: tuple[HeadRef, ...] = ()


def propose(
    connection: Connection,
    order: Order,
    called_for: Collection[HeadRef],
    scope: str = "head",
    *,
    cooldown_seconds: float = 0.0,
    once: str = "",
) -> Gate:
    """Order or propose, as `order` says, its mode for the heads that call for it, beside the modes that they have.

    The caller holds the run. What a person rejected or took back holds against every machine until a new warning.
    cooldown_seconds: how long after an order of the service or of a webhook none follows. once: names who asks, who is
    heard once a week about the same heads.
    """
    if not called_for:
        return Gate("observed", "its heads are switched")
    if not is_mode(order.mode):
        return Gate("refused", f"mode {order.mode} is not known to this service; it may be the older one")
    modes, held = modes_here(connection, order.run_id)
    loose = set(called_for) - rejected_heads(connection, order.run_id)
    wanted = switches(loose, modes, order.mode, scope, held)
    heads = tuple(sorted(ref for own in wanted.values() for ref in own))
    if not heads:
        who = "took the switch of these heads back" if loose else "rejected this switch"
        return Gate("observed", f"a person {who}, which holds until one of these heads has a new warning")
    if nobody_left(heads, heads_by_rank(connection, [order.run_id]).get(order.run_id, {})):
        return Gate("refused", "every rank that holds these heads has ended", heads)
    key = hashlib.sha256(f"{once}:{heads}".encode()).hexdigest()
    if once and _has_acted(connection, key):
        return Gate("duplicate", "this alert has acted before", heads)
    if why := in_the_way(connection, order.run_id, set(heads), cooldown_seconds):
        return Gate("refused", why, heads)
    for mode, own in wanted.items():
        create(connection, replace(order, mode=mode_name(mode), heads=own))
    if once:
        _remember(connection, key)
    return Gate("ordered" if order.state == "pending" else "proposed", heads=heads)


def _has_acted(connection: Connection, key: str) -> bool:
    """Whether an alert of this key has ordered or proposed something within a week."""
    known = webhook_alerts.c.key == key, webhook_alerts.c.unix_seconds >= time.time() - _REMEMBERED_SECONDS
    return connection.execute(select(webhook_alerts.c.key).where(*known)).first() is not None


def _remember(connection: Connection, key: str) -> None:
    now = time.time()
    connection.execute(delete(webhook_alerts).where(webhook_alerts.c.unix_seconds < now - _REMEMBERED_SECONDS))
    connection.execute(insert_or_ignore(connection, webhook_alerts).values(key=key, unix_seconds=now))


def in_the_way(connection: Connection, run_id: int, heads: set[HeadRef], cooldown: float = 0.0) -> str | None:
    """Why no machine may order or propose a switch of these heads now; None where nothing is in the way.

    An order that is carried out is not: it has made the heads what they are, or was undone.
    """
    now, mine = time.time(), commands.c.run_id == run_id
    # one that lies ahead by more than another replica's clock may was ordered by a clock that was wrong
    lately = commands.c.created > now - cooldown, commands.c.created <= now + cooldown
    ours = mine, commands.c.source.in_(_COOLED), commands.c.state != "rejected", *lately
    last = connection.execute(select(func.max(commands.c.created)).where(*ours)).scalar()
    if cooldown and last is not None:
        return f"the run's cool-down lasts {cooldown - (now - last):.0f} s more"
    waiting = select(commands.c.heads, commands.c.state, commands.c.source)
    rows = connection.execute(waiting.where(mine, commands.c.state.in_((*OPEN, "proposed")), ~commands.c.dry_run)).all()
    for row in rows:
        named = heads if row.heads is None else set(heads_of(row) or ())
        if row.state == "proposed" and heads <= named:
            return "a proposal for these heads waits for approval"
        if row.state != "proposed" and not named.isdisjoint(heads):
            return "a command for these heads is under way"
    machines = sum(row.source != "api" for row in rows)
    return f"{machines} orders of machines wait already" if machines >= _MOST_WAITING else None
