"""The current state of runs, for page, API, command line and /metrics; changes of their description, and deletion.

Some values are missing from most samples: spectral norms, the entropy of sampled rows, numbers that a training reports
rarely. /metrics shows the last known value of each, because an intermittent series draws only dots and cannot keep an
alert firing.
"""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, Row, desc, func, or_, select, tuple_, update

from foreshock.contract.incident import Incident
from foreshock.contract.metrics.run_metrics import FIRST_STEP_SECONDS, HUNG_SECONDS, HUNG_STEPS, SILENT_SECONDS
from foreshock.contract.slots import RARE, Slot, Words, fitted
from foreshock.contract.wire import PER_HEAD, SEVERITIES, AgentHealth, HeadRef, Layer, Sample, Severity
from foreshock.server.models import ActiveWarning, Decision, Description, LayerState, RunDetail, RunList, RunSummary
from foreshock.server.problems import ProblemError
from foreshock.server.readings import (
    LIVE_SAMPLES,
    NOTHING_SEEN,
    SCALARS,
    Axis,
    MergedSteps,
    Newest,
    layers_of,
    merge,
    newest_samples,
    read_back,
)
from foreshock.server.runs.eventlog import printable, shared_sentence, write_events
from foreshock.server.runs.incidents import Orders, change_of, incidents_of, orders_of, warned_of
from foreshock.server.runs.ranks import described, status_of
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import Store, lock_runs
from foreshock.server.store.retention import delete_run
from foreshock.server.store.schema import boots, runs, samples, topologies, warnings

_SEVERITIES: Final[tuple[Severity | None, ...]] = (None, *SEVERITIES)


@dataclass(frozen=True)
class RunNow:
    """The current state of a run."""

    row: Row[Any]
    starts: list[Row[Any]]
    """The present process starts (`process_starts.of_now`)."""
    raised: list[ActiveWarning]
    incidents: list[Incident]
    """Incidents that are not closed, the most urgent first."""
    newest: Newest | None
    """Its heads and the samples of its newest reading."""

    @cached_property
    def reading(self) -> MergedSteps | None:
        """Its newest reading."""
        return None if self.newest is None else merge(*self.newest)


def runs_now(connection: Connection, rows: Sequence[Row[Any]], verify_steps: int) -> list[RunNow]:
    """Read the state of these runs with a fixed number of queries. verify_steps: as for `incidents_of`."""
    ids = [row.id for row in rows]
    starts, raised = process_starts.of_now(connection, ids), active_warnings(connection, ids)
    newest = newest_samples(connection, ids)
    made = incidents_of(connection, list(raised), verify_steps, starts=starts, newest=newest)
    not_closed = {run_id: [one for one in own if one.state != "closed"] for run_id, own in made.items()}
    return [
        RunNow(row, starts[row.id], raised.get(row.id, []), not_closed.get(row.id, []), newest.get(row.id))
        for row in rows
    ]


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


def earlier_samples(connection: Connection, newest: Mapping[int, Newest]) -> dict[int, Earlier]:
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


def summaries(
    connection: Connection, rows: Sequence[Row[Any]], verify_steps: int
) -> list[tuple[RunNow, dict[str, Any]]]:
    """Return each run with the fields of its RunSummary. verify_steps: as for `incidents_of`."""
    older = process_starts.overlapping(connection, [row.id for row in rows])
    found = runs_now(connection, rows, verify_steps)
    return [(now, _summary(now, older[now.row.id])) for now in found]


def _summary(now: RunNow, older: Sequence[Row[Any]]) -> dict[str, Any]:
    row, reading = now.row, now.reading
    latest, description = reading.latest() if reading else {}, described(now.starts)
    stepped = [start.stepped for start in process_starts.newest(now.starts).values() if start.stepped is not None]
    shared = list(process_starts.shared([*now.starts, *older]))
    keys = ("policy", "numerics", "mitigation", "switch_scope", "qk_clip", "world_size")
    return {
        "run": row.name,
        "status": status_of(now.starts),
        "ranks": len({start.rank for start in now.starts}),
        "shared_ranks": shared_sentence(shared) if shared else None,
        "first_seen_unix_seconds": row.first_seen,
        "last_seen_unix_seconds": row.last_seen,
        "last_step": int(reading.steps[-1]) if reading else None,
        "last_step_unix_seconds": max(stepped, default=None),
        "hung_after_seconds": hung_after(latest.get("run.step_time")),
        "loss": latest.get("run.loss"),
        "worst_risk": latest.get("run.worst_risk"),
        "active_warnings": len(now.raised),
        "forecast_steps": min((w.forecast_steps for w in now.raised if w.forecast_steps is not None), default=None),
        "incidents": [change_of(one) for one in now.incidents],
        "display_name": row.display_name,
        "tags": tags_of(row),
        "labels": description.get("labels", {}),
        **{key: description.get(key) for key in keys},
    }


def hung_after(step_seconds: float | None) -> float:
    """Return the seconds without a finished step after which an active run is hung; same as in ForeshockRunHung."""
    if step_seconds is None or not math.isfinite(step_seconds):
        return FIRST_STEP_SECONDS
    return max(HUNG_STEPS * step_seconds, HUNG_SECONDS)


def tags_of(row: Row[Any]) -> list[str]:
    """Return the tags in a row of `runs`, sorted."""
    return list(json.loads(row.tags)) if row.tags else []


def active_warnings(
    connection: Connection, run_ids: Sequence[int], named: Sequence[str] | None = None
) -> dict[int, list[ActiveWarning]]:
    """Return active warnings, except those of steps that a later boot repeated; `named`: only those with these ids."""
    picked = (warnings.c.active,) if named is None else (warnings.c.active, warnings.c.uid.in_(named))
    return {
        run_id: [ActiveWarning(**dict(one.verdict), rank=one.rank, raised_step=one.raised_step) for one in own]
        for run_id, own in warned_of(connection, run_ids, *picked).items()
    }


def run_detail(connection: Connection, row: Row[Any], verify_steps: int) -> RunDetail:
    """Return the full state of a run."""
    [(now, summary)] = summaries(connection, [row], verify_steps)
    lost = losses(connection, [row.id])[row.id]
    return RunDetail(
        **summary,
        **condition_of(summary),
        versions=described(now.starts).get("versions", {}),
        layers=_layers(connection, now),
        warnings=now.raised,
        latest=now.reading.latest() if now.reading else {},
        agent_dropped=dict(sorted(lost.dropped.items())),
        agent_faults=dict(sorted(lost.faults.items())),
        notes=row.notes or "",
    )


@dataclass
class Losses:
    """Lost events, faults and non-finite steps of a run, all process starts together."""

    dropped: Counter[str] = field(default_factory=Counter)
    """Events that agents lost, by reason."""
    faults: Counter[str] = field(default_factory=Counter)
    """Faults of agents, by component."""
    nonfinite_steps: int = 0
    """Steps with a non-finite loss, at the rank that has the most."""


def losses(connection: Connection, run_ids: Collection[int]) -> dict[int, Losses]:
    """Return the losses of each of these runs; process starts with the same report are grouped in the query."""
    found: dict[int, Losses] = defaultdict(Losses)
    same = boots.c.run_id, boots.c.rank, boots.c.health
    sums = (
        func.min(boots.c.id).label("id"),
        func.count().label("starts"),
        func.sum(boots.c.nonfinite_steps).label("steps"),
    )
    by_rank: Counter[tuple[int, int]] = Counter()
    for row in connection.execute(select(*same, *sums).where(boots.c.run_id.in_(run_ids)).group_by(*same)):
        own = found[row.run_id]
        by_rank[row.run_id, row.rank] += int(row.steps)
        own.nonfinite_steps = max(own.nonfinite_steps, by_rank[row.run_id, row.rank])
        health = read_back(AgentHealth, row.health, "health of boot", row.id) if row.health else None
        for counts, more in ((own.dropped, health.dropped), (own.faults, health.faults)) if health else ():
            counts.update({key: row.starts * count for key, count in more.items()})
    return found


def _layers(connection: Connection, now: RunNow) -> list[LayerState]:
    known: dict[int, Layer] = {}
    heads: dict[int, set[int]] = defaultdict(set)
    hashes = {start.topology for start in now.starts}
    found = connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)).order_by("hash"))
    for layer in (layer for topology in found for layer in layers_of(topology.layers)):
        known[layer.layer] = layer
        heads[layer.layer] |= set(layer.heads)
    modes, _ = orders_of(connection, [now.row.id]).get(now.row.id, Orders()).modes(now.newest)
    risk: dict[HeadRef, float] = {}
    if now.reading is not None and now.newest is not None:
        known_risk = zip(now.newest[0].heads, now.reading.fields["risk"][-1].tolist(), strict=True)
        risk = {ref: value for ref, value in known_risk if not math.isnan(value)}
    return [
        LayerState(
            **layer.model_dump(include={"layer", "name", "served_by", "sampled"}),
            kv_heads=layer.kv_heads if layer.kv_heads_known else None,
            head_dim=layer.head_dim or None,
            heads=(own := sorted(heads[number])),
            modes=[modes.get((number, head)) for head in own],
            risk=[risk.get((number, head)) for head in own],
        )
        for number, layer in sorted(known.items())
    ]


class SummaryCache:
    """A cache of summaries, each valid until the run changes; their condition is computed at every read."""

    def __init__(self, most: int = 20_000) -> None:
        """most: the maximum number of cached summaries; if there are more, the cache is cleared."""
        self._most = most
        self._kept: dict[int, tuple[int, dict[str, Any]]] = {}

    def of(self, connection: Connection, rows: Sequence[Row[Any]], verify_steps: int) -> list[dict[str, Any]]:
        """Return the fields of RunSummary for each run. verify_steps: as for `incidents_of`."""
        kept = self._kept  # a concurrent read may replace the attribute by an empty dictionary
        new = [row for row in rows if kept.get(row.id, (None,))[0] != row.changes]
        if len(kept) > self._most:
            self._kept, new = (kept := {}), list(rows)
        for now, fields in summaries(connection, new, verify_steps):
            kept[now.row.id] = now.row.changes, fields
        found = [kept[row.id][1] for row in rows]
        return [fields | condition_of(fields) for fields in found]


def list_runs(
    connection: Connection,
    known: SummaryCache,
    prefix: str,
    search: str,
    cursor: str | None,
    limit: int,
    steps: int,
) -> RunList:
    """Return runs whose names begin with `prefix`, the one heard from last first. steps: `verify_steps`.

    search: part of the name, the display name, or a tag.
    """
    query = select(runs).order_by(desc(runs.c.last_seen), desc(runs.c.name)).limit(limit + 1)
    if prefix:
        query = query.where(runs.c.name.startswith(prefix, autoescape=True))
    if search:
        named = (runs.c.name, runs.c.display_name, runs.c.tags)
        query = query.where(or_(*(column.icontains(search, autoescape=True) for column in named)))
    if cursor is not None:
        last_seen, _, name = cursor.partition("-")  # an id would reveal how many runs other tenants have
        query = query.where(tuple_(runs.c.last_seen, runs.c.name) < tuple_(float.fromhex(last_seen), name))
    rows = connection.execute(query).all()
    more = rows[limit - 1] if len(rows) > limit else None
    found = [RunSummary.model_validate(fields) for fields in known.of(connection, rows[:limit], steps)]
    return RunList(runs=found, next_cursor=f"{more.last_seen.hex()}-{more.name}" if more else None)


def find_run(connection: Connection, run: str) -> Row[Any]:
    """Return the row of a run. Raises ProblemError if the run does not exist."""
    row = connection.execute(select(runs).where(runs.c.name == run)).first()
    if row is None:
        raise ProblemError(404, f"There is no run {run[:128]!r}: it was deleted, or its name is misspelt.")
    return row


def describe(connection: Connection, run: str, who: str, description: Description) -> None:
    """Store the changed fields of a run's description, with an audit row and an event."""
    row = find_run(connection, run)
    lock_runs(connection, [row.id])
    row = find_run(connection, run)
    before = {"display_name": row.display_name or "", "tags": tags_of(row), "notes": row.notes or ""}
    wanted = {
        "display_name": description.display_name,
        "tags": None if description.tags is None else sorted(set(description.tags)),
        "notes": description.notes,
    }
    new = {key: value for key, value in wanted.items() if value is not None and value != before[key]}
    if not new:
        return
    stored = {key: (json.dumps(value) if key == "tags" else value) or None for key, value in new.items()}
    connection.execute(
        update(runs)
        .where(runs.c.id == row.id)
        .values(**stored, changes=runs.c.changes + 1)  # invalidates cached summaries
    )
    audit.append(connection, actor=who, action="described", run=run, details=new)
    sentence = printable(f"{who} changed the run's {' and '.join(new).replace('_', ' ')}.")
    own = {"run_id": row.id, "kind": "described", "unix_seconds": time.time(), "sentence": sentence}
    write_events(connection, [own])


async def delete(store: Store, run: str, who: str, decision: Decision) -> None:
    """Delete a run and all its data, in small transactions; the audit trail records who deleted it and why.

    Raises ProblemError if the run does not exist, or still trains: its next batch would create it again.
    """
    entry: dict[str, Any] = {"actor": who, "run": run, "details": {"reason": decision.reason}}
    trains = ProblemError(
        409,
        f"Run {run} still trains, so its next batch would create it again. Stop it, or wait until it has sent nothing "
        f"for {SILENT_SECONDS:.0f} s.",
    )

    def begin(connection: Connection) -> Row[Any]:
        row = find_run(connection, run)
        starts = process_starts.of_now(connection, [row.id])[row.id]
        if status_of(starts) == "active" and time.time() - row.last_seen < SILENT_SECONDS:
            raise trains
        audit.append(connection, action="deletion begun", **entry)
        return row

    row = await store.write(begin)
    record = partial(audit.append, action="deleted", **entry)
    if not await delete_run(store, row.id, math.nextafter(row.last_seen, math.inf), record):
        raise trains
