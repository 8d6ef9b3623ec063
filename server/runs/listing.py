"""What is known of runs: the list, and one run at its last step."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, desc, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import FIRST_STEP_SECONDS, HUNG_SECONDS, HUNG_STEPS
from foreshock.contract.modes import mode_name
from foreshock.contract.wire import AgentHealth, Layer, Verdict
from foreshock.server.curves.merging import MergedSteps, axis_of, merge
from foreshock.server.curves.series import number
from foreshock.server.models import ActiveWarning, LayerState, RunDetail, RunList, RunStatus, RunSummary
from foreshock.server.runs.incidents import change_of, incidents_of
from foreshock.server.runs.newest import described, newest_samples
from foreshock.server.store import process_starts
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import boots, runs, topologies, warnings
from foreshock.server.store.topology import layers_of

_MOST_KEPT = 20_000
"""Runs whose summaries are kept; beyond, all are read again."""


class Known:
    """Summaries by run, kept until something of the run is stored; its incidents are read anew each time."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, dict[str, Any]]] = {}

    async def of(
        self, connection: AsyncConnection, rows: Sequence[Row[Any]], verify_steps: int
    ) -> list[dict[str, Any]]:
        """The fields of RunSummary for each run. verify_steps: as for `incidents_of`."""
        new = [row for row in rows if self._kept.get(row.id, (None,))[0] != row.changes]
        if len(self._kept) > _MOST_KEPT:
            self._kept, new = {}, list(rows)
        for row, (fields, _) in zip(new, await summaries(connection, new, verify_steps), strict=True):
            self._kept[row.id] = row.changes, fields
        found = {row.id: self._kept[row.id][1] for row in rows}
        fresh = {row.id for row in new}
        warned = [i for i, fields in found.items() if fields["active_warnings"] and i not in fresh]
        standing = await incidents_of(connection, warned, verify_steps) if warned else {}
        open_ = {i: [change_of(one) for one in standing.get(i, ()) if one.state != "closed"] for i in warned}
        return [found[row.id] | ({"incidents": open_[row.id]} if row.id in open_ else {}) for row in rows]


async def list_runs(
    connection: AsyncConnection, known: Known, prefix: str, search: str, cursor: str | None, limit: int, steps: int
) -> RunList:
    """Runs whose names begin with `prefix`, the one heard from last first. steps: `verify_steps`.

    search: part of the name, of what people call the run, or of a tag.
    """
    query = select(runs).order_by(desc(runs.c.last_seen), desc(runs.c.id)).limit(limit + 1)
    if prefix:
        query = query.where(runs.c.name.startswith(prefix, autoescape=True))
    if search:
        named = (runs.c.name, runs.c.display_name, runs.c.tags)
        query = query.where(or_(*(column.icontains(search, autoescape=True) for column in named)))
    if cursor is not None:
        last_seen, _, run_id = cursor.partition("-")
        query = query.where(tuple_(runs.c.last_seen, runs.c.id) < tuple_(float.fromhex(last_seen), int(run_id)))
    rows = (await connection.execute(query)).all()
    more = rows[limit - 1] if len(rows) > limit else None
    found = [RunSummary.model_validate(fields) for fields in await known.of(connection, rows[:limit], steps)]
    return RunList(runs=found, next_cursor=f"{more.last_seen.hex()}-{more.id}" if more else None)


async def summaries(
    connection: AsyncConnection, rows: Sequence[Row[Any]], verify_steps: int
) -> list[tuple[dict[str, Any], MergedSteps | None]]:
    """The fields of RunSummary for each run, with its newest reading. verify_steps: as for `incidents_of`."""
    found: dict[int, list[Row[Any]]] = defaultdict(list)
    for boot in await connection.execute(select(boots).where(boots.c.run_id.in_([row.id for row in rows]))):
        found[boot.run_id].append(boot)
    raised = await active_warnings(connection, [row.id for row in rows])
    samples = await newest_samples(connection, [row.id for row in rows])
    standing = await incidents_of(connection, list(raised), verify_steps, starts=found, newest=samples)
    newest = {run_id: (axis, merge(axis, own)) for run_id, (axis, own) in samples.items()}
    result = []
    for row in rows:
        reading = newest[row.id][1] if row.id in newest else None
        latest = reading.latest() if reading else {}
        result.append(
            (
                {
                    "run": row.name,
                    "first_seen_unix_seconds": row.first_seen,
                    "last_seen_unix_seconds": row.last_seen,
                    "last_step": int(reading.steps[-1]) if reading else None,
                    "last_step_unix_seconds": _last_step(found[row.id]),
                    "hung_after_seconds": hung_after(latest.get("run.step_time")),
                    "loss": latest.get("run.loss"),
                    "worst_risk": latest.get("run.worst_risk"),
                    "active_warnings": len(raised.get(row.id, [])),
                    "forecast_steps": _shortest(raised.get(row.id, [])),
                    "incidents": [change_of(one) for one in standing.get(row.id, ()) if one.state != "closed"],
                    "display_name": row.display_name,
                    "tags": tags_of(row),
                    **_described(found[row.id]),
                },
                reading,
            )
        )
    return result


def _last_step(rows: Sequence[Row[Any]]) -> float | None:
    living = process_starts.newest(rows).values()
    return max((row.stepped for row in living if row.stepped is not None), default=None)


def hung_after(step_seconds: float | None) -> float:
    """How long an active run may end no step before it hangs, in seconds: as the alert ForeshockRunHung has it."""
    if step_seconds is None or not math.isfinite(step_seconds):
        return FIRST_STEP_SECONDS
    return max(HUNG_STEPS * step_seconds, HUNG_SECONDS)


def _shortest(raised: Sequence[ActiveWarning]) -> float | None:
    return min((w.forecast_steps for w in raised if w.forecast_steps is not None), default=None)


def status_of(rows: Sequence[Row[Any]]) -> RunStatus:
    """A run has finished when the newest process start of every rank has; the worst ending names it."""
    endings = {row.finished_status for row in process_starts.newest(rows).values()}
    if not endings or None in endings:
        return "active"
    return "failed" if "failed" in endings else "stopped" if "stopped" in endings else "completed"


def tags_of(row: Row[Any]) -> list[str]:
    """The tags of a row of `runs`, sorted."""
    return list(json.loads(row.tags)) if row.tags else []


def _described(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    said = described(rows)
    keys = ("policy", "numerics", "mitigation", "switch_scope", "world_size")
    return {
        "status": status_of(rows),
        "ranks": len({row.rank for row in rows}),
        "labels": said.get("labels", {}),
        **{key: said.get(key) for key in keys},
    }


async def active_warnings(
    connection: AsyncConnection, run_ids: Sequence[int], named: Sequence[str] | None = None
) -> dict[int, list[ActiveWarning]]:
    """Warnings that are raised, not cleared, and not of steps that a later boot does again; all, or of these names."""
    query = (
        select(warnings, boots.c.until_step)
        .join(boots, warnings.c.boot_id == boots.c.id)
        .where(warnings.c.run_id.in_(run_ids), warnings.c.active)
        .order_by(warnings.c.raised_step, warnings.c.rank, warnings.c.uid)
    )
    if named is not None:
        query = query.where(warnings.c.uid.in_(named))
    raised: dict[int, list[ActiveWarning]] = defaultdict(list)
    for row in await connection.execute(query):
        said = read_back(Verdict, row.verdict, "warning", (row.run_id, row.rank, row.uid))
        if said is None:
            continue
        if row.until_step is not None and said.step > row.until_step:
            continue
        fields = said.model_dump(exclude={"kind", "state"})
        raised[row.run_id].append(ActiveWarning(**fields, rank=row.rank, raised_step=row.raised_step))
    return raised


async def run_detail(connection: AsyncConnection, row: Row[Any], verify_steps: int) -> RunDetail:
    """Everything known of a run."""
    [(summary, reading)] = await summaries(connection, [row], verify_steps)
    rows = (await connection.execute(select(boots).where(boots.c.run_id == row.id))).all()
    dropped, faults = health_totals(rows)
    return RunDetail(
        **summary,
        versions=described(rows).get("versions", {}),
        layers=await _layers(connection, rows, reading, row.id),
        warnings=(await active_warnings(connection, [row.id])).get(row.id, []),
        latest=reading.latest() if reading else {},
        agent_dropped=dropped,
        agent_faults=faults,
        notes=row.notes or "",
    )


def health_totals(rows: Sequence[Row[Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Events dropped by reason and faults by component, all boots together."""
    dropped: dict[str, int] = defaultdict(int)
    faults: dict[str, int] = defaultdict(int)
    for row in rows:
        health = read_back(AgentHealth, row.health, "health of boot", row.id) if row.health else None
        if health is not None:
            for reason, count in health.dropped.items():
                dropped[reason] += count
            for component, count in health.faults.items():
                faults[component] += count
    return dict(sorted(dropped.items())), dict(sorted(faults.items()))


async def _layers(
    connection: AsyncConnection, rows: Sequence[Row[Any]], reading: MergedSteps | None, run_id: int
) -> list[LayerState]:
    hashes = {row.topology for row in rows if row.topology}
    known: dict[int, Layer] = {}
    heads: dict[int, set[int]] = defaultdict(set)
    found = await connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)).order_by("hash"))
    for topology in found:
        for layer in layers_of(topology.layers):
            known[layer.layer] = layer
            heads[layer.layer] |= set(layer.heads)
    index = (await axis_of(connection, run_id)).index()
    states = []
    for number_, layer in sorted(known.items()):
        own = sorted(heads[number_])
        where = [index[number_, head] for head in own]
        modes = [reading.fields["modes"][-1, i] for i in where] if reading else [math.nan] * len(own)
        states.append(
            LayerState(
                **layer.model_dump(include={"layer", "name", "head_dim", "served_by", "sampled"}),
                kv_heads=layer.kv_heads if layer.kv_heads_known else None,
                heads=own,
                modes=[None if math.isnan(mode) else _mode_name(int(mode)) for mode in modes],
                risk=[number(reading.fields["risk"][-1, i]) if reading else None for i in where],
            )
        )
    return states


def _mode_name(mode: int) -> str | None:
    try:
        return mode_name(mode)
    except ValueError:
        return None
