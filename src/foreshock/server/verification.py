"""Verifies switches: compares the growth of the heads in the steps after a switch with that in the steps before it.

Only heads with a warning, before the switch or in the steps after it, are judged (contract.switch_verdict), each by its
own numbers. Healthy heads, and heads that have left the mode since by another order or a resume, say nothing about the
switch. Heads that are not arrested are reported. While one of their warnings is active, a stronger mitigation is
proposed if there is one; a person decides, under every policy. The agent still watches switched heads.
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
from foreshock.server.runs.ranks import described
from foreshock.server.settings import Settings
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, lock_runs
from foreshock.server.store.schema import commands as table
from foreshock.server.store.schema import runs

_MODE: Final = BY_KEY["head.mode"]
_MOST_HEADS: Final = 64
_AT_ONCE: Final = 16
_LIVING_SECONDS: Final = 86_400.0
"""Switches of a run that has been silent for a day are never judged, because its steps no longer advance."""


@dataclass(frozen=True)
class Due:
    """An applied switch that is due for verification: its heads with a warning, those whose warning is still active,
    and the growth of their signals."""

    row: Row[Any]
    at: int
    heads: list[HeadRef]
    active: set[HeadRef]
    growths: dict[HeadRef, list[SignalGrowth]]


async def verify(store: Store, settings: Settings) -> None:
    """Judge every applied switch after `verify_steps` steps. Called periodically.

    Samples, which may be many, are read before the write transaction starts, because ingest waits for that one.
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
    """Return the switched heads to judge, at most _MOST_HEADS, and those of them whose warning is still active.

    A head is judged if it had a warning that was active at step `at` or raised in the `steps` after it, and if it
    stayed in its mode during these steps.
    """
    switched = {one.ref: one.after for one in done if one.before != row.mode}
    warned = [
        one
        for one in warned_of(connection, [row.run_id]).get(row.run_id, ())
        if one.verdict.severity != "info" and one.raised_step <= at + steps and (one.active or one.verdict.step > at)
    ]
    heads = sorted(switched.keys() & {one.ref for one in warned})[:_MOST_HEADS]
    window = Window(row.run_id, at + 1, at + steps, POINTS, (at + 1, at + steps))
    modes = draw(connection, axis_of(connection, row.run_id), [Curve(_MODE, *ref) for ref in heads], window)
    stayed = [ref for ref, line in zip(heads, modes, strict=True) if not _left(switched[ref], line.last)]
    active = {one.ref for one in warned if one.active}
    return stayed, {ref for ref in stayed if ref in active}


def _left(mode: str, sampled: Sequence[float | None]) -> bool:
    """Whether a sample shows a head in another mode than the switch gave it."""
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
    """Return the verdict on a switch of these heads at step `at` in words, with the numbers of the head that grew most.

    active: whether one of their warnings is active at the time of the verdict.
    """
    if not heads:
        return f"The switch to {mode} at step {at:,} is not judged: no head with a warning had it for {steps:,} steps."
    sentence = f"{heads_in_words([*heads])} after the switch to {mode} at step {at:,}: "
    sentence += {
        "verified": "verified, the growth has stopped",
        "not arrested": "not arrested, the growth continues",
        "unknown": "cannot be verified, too few samples before it or after it",
    }[verdict]
    grown = [(growth, ref) for ref, own in heads.items() for growth in own]
    if grown:
        growth, ref = max(grown, key=lambda one: (one[0].excess, one[0].after))
        sentence += f" ({f'{heads_in_words([ref])}: ' if len(heads) > 1 else ''}{growth.sentence(steps)})"
    if verdict == "not arrested" and not active:
        sentence += ". These heads have no active warning: watch the growth."
    elif verdict == "not arrested":
        further = stronger(mode)
        sentence += f". Escalate: {further}." if further else ". There is no stronger mode: resume from a checkpoint."
    return sentence[0].upper() + sentence[1:]


def _judge(connection: Connection, settings: Settings, due: Due) -> None:
    """Store the verdict, and propose a stronger mode if there is one."""
    row, growths = due.row, due.growths
    loose = [ref for ref, found in growths.items() if not all(growth.arrested for growth in found)]
    verdict: Verification = "unknown" if not growths else "not arrested" if loose else "verified"
    named, active = {ref: growths.get(ref, []) for ref in loose or due.heads}, not due.active.isdisjoint(loose)
    sentence = judged_in_words(named, row.mode, due.at, verdict, settings.verify_steps, active=active)
    next_mode = stronger(row.mode) if active else None
    lock_runs(connection, [row.run_id])
    open_ = update(table).where(table.c.id == row.id, table.c.verification.is_(None)).values(verification=verdict)
    if connection.execute(open_).rowcount == 0:
        return  # another replica was first, and has done the rest
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
    """Return the growth of the signals of each head that was sampled often enough before and after step `at`."""
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
