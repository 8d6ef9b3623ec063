"""Summaries and details of runs; changes of a run's display name, tags and notes; deletion of runs."""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from sqlalchemy import Connection, Row, desc, func, or_, select, tuple_, update

from foreshock.contract.incident import Incident
from foreshock.contract.metrics.run_metrics import FIRST_STEP_SECONDS, HUNG_SECONDS, HUNG_STEPS, SILENT_SECONDS
from foreshock.contract.wire import AgentHealth, HeadRef, Layer
from foreshock.server.models import ActiveWarning, Decision, Description, LayerState, RunDetail, RunList, RunSummary
from foreshock.server.problems import ProblemError
from foreshock.server.readings import MergedSteps, layers_of, merge, read_back
from foreshock.server.runs.eventlog import printable, shared_sentence, write_events
from foreshock.server.runs.incidents import Newest, Orders, change_of, incidents_of, orders_of, warned_of
from foreshock.server.runs.newest import condition_of, described, newest_samples, status_of
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import Store, lock_runs
from foreshock.server.store.retention import delete_run
from foreshock.server.store.schema import boots, runs, topologies, warnings


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


@dataclass(frozen=True)
class RunNow:
    """The present state of a run."""

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
