"""What became of a switch: some steps later the head's growth is compared with the one before it.

A head is arrested when each signal that grew before the switch (its score offset, its largest score) grows afterwards
by at most a third as much, in logarithms over as many steps. Below a level (3 nats, a score of 256) nothing counts as
growth: the offset of a healthy head wanders about zero, and its scores grow as it learns. What is not arrested is
reported, and a stronger mitigation proposed where one is left: a person decides, under every policy. The agent goes on
watching a head that was switched.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, select, update

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.modes import mode_name, stronger
from foreshock.contract.orders import switches
from foreshock.contract.wire import HeadRef, Switched
from foreshock.server.commands import lifecycle as commands
from foreshock.server.commands.bounds import refusal
from foreshock.server.curves.answers import CurveLine
from foreshock.server.curves.drawing import Curve, Window, draw, edges
from foreshock.server.curves.merging import axis_of
from foreshock.server.curves.rollups import Roller
from foreshock.server.models import Verification
from foreshock.server.runs.incidents import present, record_incidents
from foreshock.server.runs.newest import described
from foreshock.server.runs.words import heads_in_words
from foreshock.server.settings import Settings
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, lock_runs
from foreshock.server.store.schema import commands as table
from foreshock.server.store.schema import runs

SIGNALS: Final = {"head.score_offset": "score offset", "head.score_max": "largest score"}
_LEVELS: Final = {"head.score_offset": 3.0, "head.score_max": 256.0}
"""Sizes up to which a signal may grow without a word, as the detectors' offset_level and score_level."""
_NOTICED: Final = math.log(1.1)
"""Growth over the window below which a signal did not grow: a tenth."""
_LEFT: Final = 1 / 3
"""Share of the growth before that an arrested head may keep."""
_POINTS, _LEAST_POINTS = 48, 6
_MOST_HEADS: Final = 64
_AT_ONCE: Final = 16
_LIVING_SECONDS: Final = 86_400.0
"""What a run was switched to that has been silent for a day is never judged: its steps do not pass any more."""


@dataclass(frozen=True)
class SignalGrowth:
    """Logarithm of a signal's growth over the window before a switch and over the one after it."""

    signal: str
    before: float
    after: float
    above: bool = True
    """whether the signal ended above the level from which its growth counts"""

    @property
    def arrested(self) -> bool:
        """It grows no more, or by a third of what it did at most, or has not come far."""
        return not self.above or self.after <= max(
            _NOTICED / 5 if self.before > _NOTICED else _NOTICED, _LEFT * self.before
        )

    def sentence(self, steps: int) -> str:
        """The growth in words."""
        before, after = (f"{100 * math.expm1(min(value, 20.0)):+.0f} %" for value in (self.before, self.after))
        return f"{self.signal} {before} in the {steps:,} steps before, {after} in those after"


@dataclass(frozen=True)
class Due:
    """An applied switch whose steps have passed, and how its heads grew."""

    row: Row[Any]
    at: int
    heads: list[HeadRef]
    growths: dict[HeadRef, list[SignalGrowth]]


async def verify(store: Store, settings: Settings, roller: Roller) -> None:
    """Judge every applied switch whose steps have passed; run from time to time.

    What is read of the samples, which may be much, is read before the transaction that writes: ingest waits for that.
    """
    if not settings.verify_steps:
        return
    found = await store.read(lambda connection: _due(connection, settings, roller))
    for due in found:

        def judge(connection: Connection, due: Due = due) -> None:
            _judge(connection, settings, due)

        await store.write(judge)


def _due(connection: Connection, settings: Settings, roller: Roller) -> list[Due]:
    undone = select(table.c.undoes).where(table.c.undoes.is_not(None), table.c.state == "applied")
    query = (
        select(table, runs.c.name.label("run"))
        .join(runs)
        .where(
            table.c.state == "applied",
            table.c.mode != "plain",
            table.c.verification.is_(None),
            table.c.undoes.is_(None),
            table.c.id.not_in(undone),
            runs.c.last_seen > time.time() - _LIVING_SECONDS,
        )
        .order_by(table.c.number)
    )
    rows = connection.execute(query).all()
    tracks = commands.tracks_of(connection, [row.id for row in rows])
    found: list[Due] = []
    for row in rows:
        answers = [switched for track in tracks[row.id].values() if (switched := commands.answer_of(track)) is not None]
        at = max((answer.step for answer in answers if answer.outcome == "applied"), default=None)
        _, last = edges(connection, row.run_id)
        if at is not None and last is not None and last >= at + settings.verify_steps:
            heads = _judged(row, answers)
            growths = growth_of(connection, roller, row.run_id, heads, at, settings.verify_steps)
            found.append(Due(row, at, heads, growths))
        if len(found) == _AT_ONCE:
            break
    return found


def _judged(row: Row[Any], answers: Sequence[Switched]) -> list[HeadRef]:
    """The heads that were switched from plain; of very many, the first."""
    own = None if row.heads is None else {(layer, head) for layer, head in row.heads}
    found = {
        ref
        for answer in answers
        for ref, before in zip(answer.heads, answer.before, strict=True)
        if before != row.mode and (own is None or ref in own)
    }
    return sorted(found)[:_MOST_HEADS]


def judged_in_words(
    heads: Sequence[HeadRef], mode: str, at: int, verdict: Verification, worst: SignalGrowth | None, steps: int
) -> str:
    """What became of a switch of these heads at step `at`; `worst` grew most in the `steps` steps after it."""
    sentence = f"{heads_in_words(heads)} after the switch to {mode} at step {at:,}: "
    sentence += {
        "verified": "verified, the growth has stopped",
        "not arrested": "not arrested, it grows on",
        "unknown": "cannot be verified, too few samples before it or after it",
    }[verdict]
    if worst is not None:
        sentence += f" ({worst.sentence(steps)})"
    if verdict == "not arrested":
        further = stronger(mode)
        sentence += f". Escalate: {further}." if further else ". No stronger mode is left: go back to a checkpoint."
    return sentence[0].upper() + sentence[1:]


def _judge(connection: Connection, settings: Settings, due: Due) -> None:
    """Write the verdict down, and propose a stronger mode where one is left."""
    row, at, heads, growths = due.row, due.at, due.heads, due.growths
    running = {ref: [g for g in found if not g.arrested] for ref, found in growths.items()}
    loose = [ref for ref, found in running.items() if found]
    verdict: Verification = "unknown" if not growths else "not arrested" if loose else "verified"
    worst = max(
        (g for found in growths.values() for g in found), key=lambda g: g.after - _LEFT * g.before, default=None
    )
    next_mode = stronger(row.mode) if loose else None
    sentence = judged_in_words(loose or heads, row.mode, at, verdict, worst, settings.verify_steps)
    lock_runs(connection, [row.run_id])
    open_ = update(table).where(table.c.id == row.id, table.c.verification.is_(None)).values(verification=verdict)
    if connection.execute(open_).rowcount == 0:
        return  # another replica was first, and has done what follows
    growth = {
        f"{layer}.{head}": [[g.signal, round(g.before, 4), round(g.after, 4)] for g in found]
        for (layer, head), found in growths.items()
    }
    details = {"verification": verdict, "growth": growth}
    commands.record_transition(
        connection, row, row.run, "applied", "service", details, sentence=sentence, verification=verdict
    )
    record_incidents(connection, [row.run_id], settings.verify_steps)
    known = process_starts.of_now(connection, [row.run_id])[row.run_id]
    observed = described(known).get("policy", "observe") == "observe"
    if next_mode is None or observed or refusal(settings, connection, row.run_id, loose) is not None:
        return
    modes, held = present(connection, row.run_id)
    for mode, wanted in switches(loose, modes, next_mode, held=held).items():
        commands.propose(connection, (row.run_id, row.run), mode_name(mode), wanted, sentence)


def growth_of(
    connection: Connection, roller: Roller, run_id: int, heads: Sequence[HeadRef], at: int, steps: int
) -> dict[HeadRef, list[SignalGrowth]]:
    """For each head whose signals were sampled often enough on both sides of step `at`: how they grew."""
    axis = axis_of(connection, run_id)
    curves = [Curve(BY_KEY[key], layer, head) for layer, head in heads for key in SIGNALS]
    sides = []
    for first, last in ((max(0, at - steps), at), (at + 1, at + steps)):
        window = Window(run_id, first, last, _POINTS, (first, last))
        sides.append([_growth(line) for line in draw(connection, roller, axis, curves, window)])
    found: dict[HeadRef, list[SignalGrowth]] = {}
    for curve, before, after in zip(curves, *sides, strict=True):
        if before is not None and after is not None and curve.layer is not None and curve.head is not None:
            key = curve.metric.key
            signal = SignalGrowth(SIGNALS[key], before[0], after[0], above=after[1] > _LEVELS[key])
            found.setdefault((curve.layer, curve.head), []).append(signal)
    return found


def _growth(line: CurveLine) -> tuple[float, float] | None:
    """Logarithm of the size of the last third over that of the first, and that last size; medians, so that one sample
    decides nothing."""
    size = np.abs(np.array([value for value in line.last if value is not None and math.isfinite(value)]))
    if len(size) < _LEAST_POINTS:
        return None
    third = len(size) // 3
    early, late = np.median(size[:third]), np.median(size[-third:])
    return float(np.log(max(late, 1e-12) / max(early, 1e-12))), float(late)
