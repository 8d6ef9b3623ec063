"""The present state of runs, and their last measured values, from the newest process starts and samples.

The page, the API and the command line all use these functions. Some values are missing from most samples: spectral
norms, the entropy of sampled rows, numbers that a training reports rarely. /metrics shows the last known value of each,
because an intermittent series draws only dots and cannot keep an alert firing.
"""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, Row, and_, case, desc, func, select, tuple_

from foreshock.contract.metrics.run_metrics import SILENT_SECONDS
from foreshock.contract.slots import RARE, Slot, Words, fitted
from foreshock.contract.wire import PER_HEAD, SEVERITIES, HeadRef, Layer, Sample, Severity, Started
from foreshock.server.models import RunStatus
from foreshock.server.readings import (
    LIVE_SAMPLES,
    NOTHING_SEEN,
    SCALARS,
    Axis,
    MergedSteps,
    axes_of,
    heads_of_layers,
    merge,
    read_back,
)
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots, runs, samples, topologies

_SEVERITIES: Final[tuple[Severity | None, ...]] = (None, *SEVERITIES)


def condition_of(fields: Mapping[str, Any], now: float | None = None) -> dict[str, Any]:
    """Return the fields of RunSummary that depend on the present time, computed from its other fields.

    An active run is silent if nothing was received for some time, and hung if heartbeats arrive but no step ends. The
    severity is that of its worst open incident; at least warning if the run is silent or hung, and critical if its loss
    is not finite, even without a warning of its agent.
    """
    now = time.time() if now is None else now
    condition, since = fields["status"], None
    if condition == "active":
        stepped = fields["last_step_unix_seconds"]
        if now - fields["last_seen_unix_seconds"] >= SILENT_SECONDS:
            condition, since = "silent", fields["last_seen_unix_seconds"]
        elif stepped is not None and now - stepped >= fields["hung_after_seconds"]:
            condition, since = "hung", stepped
    found: list[Severity | None] = [one.severity for one in fields["incidents"]]
    if since is not None:
        found.append("warning")
    if fields["loss"] is not None and not math.isfinite(fields["loss"]):
        found.append("critical")
    severity = max(found, key=_SEVERITIES.index, default=None)
    urgency = _SEVERITIES.index(severity) + len(_SEVERITIES) * (fields["status"] == "active")
    return {"condition": condition, "condition_since_unix_seconds": since, "severity": severity, "urgency": urgency}


@dataclass
class RankHeads:
    """The heads that the newest process start of a rank watches."""

    boot: str
    heads: frozenset[HeadRef]
    known: bool
    finished: bool

    def may_hold(self, heads: Collection[object] | None) -> bool:
        """Whether the rank has one of these heads (None: every head), or has not reported its heads yet."""
        return heads is None or not self.known or not self.heads.isdisjoint(heads)


Ranks = Mapping[int, RankHeads]


def concerned(heads: Collection[HeadRef] | None, ranks: Ranks) -> set[int]:
    """Return the ranks that must answer an order for these heads (None: every head): active ones that may have them."""
    return {rank for rank, own in ranks.items() if not own.finished and own.may_hold(heads)}


def all_ended(heads: Collection[HeadRef] | None, ranks: Ranks) -> bool:
    """Whether at least one rank has some of these heads, and all such ranks have ended, so that none can answer.

    If no rank has them, the result is False: after a resume with another world size, a rank may still report them.
    """
    held = [own for own in ranks.values() if own.may_hold(heads)]
    return bool(held) and all(own.finished for own in held)


def nobody_left(heads: Collection[HeadRef] | None, ranks: Ranks) -> bool:
    """Whether it is certain that no active rank can carry out an order for these heads (None: every head)."""
    return bool(ranks) and not concerned(heads, ranks)


def heads_by_rank(connection: Connection, run_ids: Collection[int]) -> dict[int, dict[int, RankHeads]]:
    """Return, for each run and rank, the heads of its newest process start."""
    if not run_ids:
        return {}
    query = select(boots.c.run_id, boots.c.rank, boots.c.boot, boots.c.finished_status, boots.c.topology)
    query = query.where(boots.c.newest, boots.c.run_id.in_(run_ids)).order_by(boots.c.run_id, boots.c.rank)
    newest = connection.execute(query).all()
    hashes = {row.topology for row in newest if row.topology}
    found = connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)))
    heads = {row.hash: frozenset(heads_of_layers(row.layers)) for row in found}
    held: dict[int, dict[int, RankHeads]] = defaultdict(dict)
    for row in newest:
        own = heads.get(row.topology, frozenset())
        held[row.run_id][row.rank] = RankHeads(row.boot, own, row.topology is not None, row.finished_status is not None)
    return held


_STEPS_LOOKED_AT = 16


class _Description(Started):
    """The stored form of a `Started`; its layers are stored in `topologies`."""

    layers: tuple[Layer, ...] = ()


def described(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    """Return the description (`Started`) of the newest process start that sent one, without its layers, or {}."""
    for row in reversed(process_starts.in_order(rows)):
        description = (
            read_back(_Description, row.description, "description of boot", row.id) if row.description else None
        )
        if description is not None:
            return description.model_dump(exclude={"layers"})
    return {}


def status_of(rows: Sequence[Row[Any]]) -> RunStatus:
    """Return the status of a run: active until the newest process start of every rank has ended, then the worst end."""
    endings = {row.finished_status for row in process_starts.newest(rows).values()}
    if not endings or None in endings:
        return "active"
    return "failed" if "failed" in endings else "stopped" if "stopped" in endings else "completed"


def newest_samples(connection: Connection, run_ids: Collection[int]) -> dict[int, tuple[Axis, list[Row[Any]]]]:
    """Return, for each run with samples, its heads and the samples of its newest reading, in three queries.

    The newest reading is the newest of the last few steps that the most ranks of the newest generation have reported.
    """
    live = LIVE_SAMPLES.order_by(None)
    steps = live.with_only_columns(samples.c.step).where(samples.c.run_id == runs.c.id).group_by(samples.c.step)
    nth = steps.order_by(desc(samples.c.step)).offset(_STEPS_LOOKED_AT - 1).limit(1).correlate(runs).scalar_subquery()
    lately = select(runs.c.id, func.coalesce(nth, 0).label("first")).where(runs.c.id.in_(run_ids)).cte()
    living = func.count(func.distinct(case((boots.c.newest, boots.c.rank))))
    ranks = func.count(func.distinct(boots.c.rank))
    order = desc(living), desc(ranks), desc(samples.c.step)
    place = func.row_number().over(partition_by=samples.c.run_id, order_by=order)
    placed = live.with_only_columns(samples.c.run_id, samples.c.step, place.label("place"))
    placed = placed.join(lately, and_(samples.c.run_id == lately.c.id, samples.c.step >= lately.c.first))
    newest = placed.group_by(samples.c.run_id, samples.c.step).cte()
    same = and_(samples.c.run_id == newest.c.run_id, samples.c.step == newest.c.step, newest.c.place == 1)
    rows: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(LIVE_SAMPLES.join(newest, same)):
        rows[row.run_id].append(row)
    axes = axes_of(connection, rows.keys())
    return {run_id: (axes[run_id], own) for run_id, own in rows.items()}


_ALWAYS: Final = ""
"""Key of `boots.measured` for a list: the newest sample's step, the names that every sample of the process start has,
and, once a sample has data for heads, the number of heads, which is the same in all samples."""
_STATES: Final = "states"
NORMS: Final = ("query_norm", "key_norm", "query_key_norm")
_STEPS_AT_ONCE: Final = 4096
_STARTS: Final = 4
"""The number of newest process starts of a rank that are searched for a last measured value."""
Earlier = tuple[frozenset[str], list[Row[Any]]]
"""Names of arrays to read, and samples in the fixed order."""


def with_sample(known: str | None, sample: Sample) -> str:
    """Return `boots.measured` after one more sample; the result does not depend on the order of samples."""
    given = {name for name in (*PER_HEAD, *SCALARS) if getattr(sample, name) is not None}
    if sample.states is not None:
        words = fitted(sample.states.numpy())
        given |= {name for name, slots in RARE.items() if not _lacks(words, slots).all()}
        given |= {_STATES} if _counted(words).any() else set()
    steps: dict[str, Any] = from_json(known) if known else {_ALWAYS: [sample.step, sorted(given)]}
    newest, always, *heads = steps[_ALWAYS]
    for name in given.symmetric_difference(always):
        steps[name] = max(steps.get(name, 0), sample.step if name in given else newest)
    steps[_ALWAYS] = [max(newest, sample.step), sorted(given.intersection(always)), *(sample.head_counts() or heads)]
    return to_json(steps).decode()


def heads_measured(known: str | None) -> int | None:
    """Return the number of heads in the samples of a process start, from its `boots.measured`; None if unknown."""
    return next(iter(from_json(known)[_ALWAYS][2:]), None) if known else None


def earlier_samples(
    connection: Connection, newest: Mapping[int, tuple[Axis, Collection[Row[Any]]]]
) -> dict[int, Earlier]:
    """Return, for each run, the samples before its newest reading that have a last measured value."""
    recency = func.row_number().over(partition_by=(boots.c.run_id, boots.c.rank), order_by=boots.c.id.desc())
    columns = (boots.c.run_id, boots.c.id, boots.c.rank, boots.c.measured, boots.c.until_step, recency.label("recency"))
    known = select(*columns).where(boots.c.run_id.in_(newest), boots.c.measured.is_not(None)).subquery()
    last: dict[tuple[int, int, str], tuple[int, int]] = {}
    for boot in connection.execute(select(known).where(known.c.recency <= _STARTS)):
        for name, step in from_json(boot.measured).items():
            if name != _ALWAYS and (boot.until_step is None or step <= boot.until_step):
                key = boot.run_id, boot.rank, name
                last[key] = max(last.get(key, (-1, 0)), (step, boot.id))
    names: defaultdict[int, set[str]] = defaultdict(set)
    wanted: dict[tuple[int, int], set[int]] = defaultdict(set)
    for (run_id, _, name), (step, boot_id) in last.items():
        if step != next(iter(newest[run_id][1])).step:
            names[run_id].add(name)
            wanted[run_id, step].add(boot_id)
    rows: dict[int, list[Row[Any]]] = {run_id: [] for run_id in names}
    places = sorted(wanted)
    for first in range(0, len(places), _STEPS_AT_ONCE):  # because a statement has a maximum number of parameters
        own = tuple_(samples.c.run_id, samples.c.step).in_(places[first : first + _STEPS_AT_ONCE])
        for row in connection.execute(LIVE_SAMPLES.where(own)):
            if row.boot_id in wanted[row.run_id, row.step]:
                rows[row.run_id].append(row)
    arrays = {run_id: {_STATES if name in RARE else name for name in own} for run_id, own in names.items()}
    kept = {_STATES, *PER_HEAD}
    return {run_id: (frozenset(arrays[run_id] & kept), found) for run_id, found in rows.items() if found}


def _counted(words: Words) -> npt.NDArray[np.bool_]:
    """Return a mask of the heads of which a row was counted."""
    rows, empty, nonfinite = (words[:, slot] for slot in (Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS))
    seen: npt.NDArray[np.bool_] = rows | empty | nonfinite != 0
    return seen


def _lacks(words: Words, slots: Sequence[Slot]) -> npt.NDArray[np.bool_]:
    """Return a mask of the heads for which a sample lacks these slots."""
    lacking: npt.NDArray[np.bool_] = words[:, slots[0]] == NOTHING_SEEN[slots[0]]
    return lacking


def carry(axis: Axis, reading: MergedSteps, earlier: Earlier) -> int | None:
    """Fill missing values of the newest step with those last measured; return the step of the norms used, or None."""
    names, rows = earlier
    known = merge(axis, rows, names)
    norms_step = None
    words, counted = reading.words[-1], reading.counted[-1]
    for at in reversed(range(len(known.steps))):
        for name in names - {_STATES}:
            now, then = reading.fields[name][-1], known.fields[name][at]
            lacking = np.isnan(now) & ~np.isnan(then)
            now[lacking] = then[lacking]
            if name in NORMS and norms_step is None and lacking.any():
                norms_step = int(known.steps[at])
        if _STATES in names:
            old, was_counted = known.words[at], known.counted[at]
            lacking = was_counted & ~(counted & _counted(words))
            words[lacking], counted[lacking] = old[lacking], True
            for slots in RARE.values():
                rare = was_counted & _lacks(words, slots)
                words[np.ix_(rare, slots)] = old[np.ix_(rare, slots)]
        for name, value in known.scalars[at].items():
            if reading.scalars[-1][name] is None:
                reading.scalars[-1][name] = value
    return norms_step
