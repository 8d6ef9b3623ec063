"""What became of a switch: some steps later the growth of its heads is compared with the one before it.

Heads that had a warning are judged (contract.switch_verdict), each by its own numbers; others only if a warning of
theirs is raised afterwards: a healthy head says nothing of a switch, and neither does one that has left its mode since,
by another order or a resume. What is not arrested is reported. While a warning
of it is active, a stronger mitigation is proposed, where one is left: a person decides, under every policy. The agent
goes on watching a head that was switched.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Row, select, update

from foreshock.contract.incident import heads_in_words
from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.modes import is_mode, parse_mode, stronger
from foreshock.contract.orders import Order, Verification
from foreshock.contract.switch_verdict import POINTS, SIGNALS, SignalGrowth, growth_of
from foreshock.contract.wire import HeadRef
from foreshock.server import commands
from foreshock.server.commands import changes_for, propose
from foreshock.server.drawing import Curve, Window, draw, edges
from foreshock.server.readings import axis_of
from foreshock.server.runs.incidents import SwitchedHead, carried_out, record_incidents, warned_of
from foreshock.server.runs.newest import described
from foreshock.server.settings import Settings
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, lock_runs
from foreshock.server.store.schema import commands as table
from foreshock.server.store.schema import runs

_MODE: Final = BY_KEY["head.mode"]
_MOST_HEADS: Final = 64
_AT_ONCE: Final = 16
_LIVING_SECONDS: Final = 86_400.0
"""What a run was switched to that has been silent for a day is never judged: its steps do not pass any more."""


@dataclass(frozen=True)
class Due:
    """An applied switch whose steps have passed, its heads with a warning, those whose warning is active, and how they
    grew."""

    row: Row[Any]
    at: int
    heads: list[HeadRef]
    active: set[HeadRef]
    growths: dict[HeadRef, list[SignalGrowth]]


async def verify(store: Store, settings: Settings) -> None:
    """Judge every applied switch whose steps have passed; run from time to time.

    What is read of the samples, which may be much, is read before the transaction that writes: ingest waits for that.
    """
    if not settings.verify_steps:
        return
    for due in await store.read(partial(_due, settings=settings)):
        await store.write(partial(_judge, settings=settings, due=due))


def _due(connection: Connection, settings: Settings) -> list[Due]:
    undone = select(table.c.undoes).where(table.c.undoes.is_not(None), table.c.state == "applied")
    query = commands.WITH_RUN.where(
        table.c.state == "applied",
        table.c.action == "switch",
        table.c.mode != "plain",
        table.c.verification.is_(None),
        table.c.undoes.is_(None),
        table.c.id.not_in(undone),
        runs.c.last_seen > time.time() - _LIVING_SECONDS,
    ).order_by(table.c.number)
    rows = connection.execute(query).all()
    done = carried_out(connection, table.c.id.in_([row.id for row in rows]))
    found: list[Due] = []
    for row in rows:
        at = max((one.step for one in done[row.id]), default=None)
        _, last = edges(connection, row.run_id)
        if at is not None and last is not None and last >= at + settings.verify_steps:
            heads, active = _judged(connection, row, done[row.id], at, settings.verify_steps)
            growths = _growths(connection, row.run_id, heads, at, settings.verify_steps)
            found.append(Due(row, at, heads, active, growths))
        if len(found) == _AT_ONCE:
            break
    return found


def _judged(
    connection: Connection, row: Row[Any], done: Sequence[SwitchedHead], at: int, steps: int
) -> tuple[list[HeadRef], set[HeadRef]]:
    """The switched heads with a warning that was active at step `at` or was raised in the steps after it, if they kept
    their mode in these steps, of very many the first; and those whose warning is still active."""
    switched = {one.ref: one.after for one in done if one.before != row.mode}
    warned = [
        one
        for one in warned_of(connection, [row.run_id]).get(row.run_id, ())
        if one.verdict.severity != "info" and one.raised_step <= at + steps and (one.stands or one.verdict.step > at)
    ]
    heads = sorted(switched.keys() & {one.ref for one in warned})[:_MOST_HEADS]
    window = Window(row.run_id, at + 1, at + steps, POINTS, (at + 1, at + steps))
    modes = draw(connection, axis_of(connection, row.run_id), [Curve(_MODE, *ref) for ref in heads], window)
    kept = [ref for ref, line in zip(heads, modes, strict=True) if not _left(switched[ref], line.last)]
    standing = {one.ref for one in warned if one.stands}
    return kept, {ref for ref in kept if ref in standing}


def _left(mode: str, sampled: Sequence[float | None]) -> bool:
    """Whether a head was sampled in another mode than that which a switch gave it."""
    return is_mode(mode) and not {int(flags) for flags in sampled if flags is not None} <= {int(parse_mode(mode))}


def judged_in_words(
    heads: Mapping[HeadRef, Sequence[SignalGrowth]],
    mode: str,
    at: int,
    verdict: Verification,
    steps: int,
    *,
    active: bool,
) -> str:
    """What became of a switch of these heads at step `at`, with the numbers of that one which grew most.

    active: whether a warning of them is active at the time of the verdict.
    """
    if not heads:
        return f"The switch to {mode} at step {at:,} is not judged: no head with a warning kept it for {steps:,} steps."
    sentence = f"{heads_in_words([*heads])} after the switch to {mode} at step {at:,}: "
    sentence += {
        "verified": "verified, the growth has stopped",
        "not arrested": "not arrested, it grows on",
        "unknown": "cannot be verified, too few samples before it or after it",
    }[verdict]
    grown = [(growth, ref) for ref, own in heads.items() for growth in own]
    if grown:
        growth, ref = max(grown, key=lambda one: (one[0].excess, one[0].after))
        sentence += f" ({f'{heads_in_words([ref])}: ' if len(heads) > 1 else ''}{growth.sentence(steps)})"
    if verdict == "not arrested" and not active:
        sentence += ". It has no active warning: watch the growth."
    elif verdict == "not arrested":
        further = stronger(mode)
        sentence += f". Escalate: {further}." if further else ". There is no stronger mode: resume from a checkpoint."
    return sentence[0].upper() + sentence[1:]


def _judge(connection: Connection, settings: Settings, due: Due) -> None:
    """Write the verdict down, and propose a stronger mode where one is left."""
    row, growths = due.row, due.growths
    loose = [ref for ref, found in growths.items() if not all(growth.arrested for growth in found)]
    verdict: Verification = "unknown" if not growths else "not arrested" if loose else "verified"
    named, active = {ref: growths.get(ref, []) for ref in loose or due.heads}, not due.active.isdisjoint(loose)
    sentence = judged_in_words(named, row.mode, due.at, verdict, settings.verify_steps, active=active)
    next_mode = stronger(row.mode) if active else None
    lock_runs(connection, [row.run_id])
    open_ = update(table).where(table.c.id == row.id, table.c.verification.is_(None)).values(verification=verdict)
    if connection.execute(open_).rowcount == 0:
        return  # another replica was first, and has done what follows
    growth = {
        f"{layer}.{head}": [[g.signal, round(g.before, 4), round(g.after, 4)] for g in found]
        for (layer, head), found in growths.items()
    }
    details = {"verification": verdict, "growth": growth}
    reported = verdict if due.heads else None
    commands.record_transition(connection, row, "applied", "service", details, sentence, verification=reported)
    record_incidents(connection, [row.run_id], settings.verify_steps)
    known = process_starts.of_now(connection, [row.run_id])[row.run_id]
    observed = described(known).get("policy", "observe") == "observe"
    loose = [ref for ref in loose if ref in due.active]
    if next_mode is None or observed:
        return
    order = Order(source="service", issued_by="service", reason=sentence, state="proposed", mode=next_mode)
    orders = changes_for(connection, row.run_id, order, loose)
    propose(connection, row.run_id, orders, loose, settings.webhook_cooldown_seconds)


def _growths(
    connection: Connection, run_id: int, heads: Sequence[HeadRef], at: int, steps: int
) -> dict[HeadRef, list[SignalGrowth]]:
    """For each head whose signals were sampled often enough on both sides of step `at`: how they grew."""
    axis = axis_of(connection, run_id)
    curves = [Curve(BY_KEY[key], layer, head) for layer, head in heads for key in SIGNALS]
    sides = []
    for first, last in ((max(0, at - steps), at), (at + 1, at + steps)):
        window = Window(run_id, first, last, POINTS, (first, last))
        sides.append([line.last for line in draw(connection, axis, curves, window)])
    found: dict[HeadRef, list[SignalGrowth]] = {}
    for (ref, key), before, after in zip(((ref, key) for ref in heads for key in SIGNALS), *sides, strict=True):
        if (growth := growth_of(key, before, after)) is not None:
            found.setdefault(ref, []).append(growth)
    return found
