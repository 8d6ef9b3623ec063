"""The time series of one run, by how much they are needed: alerts first, single heads last."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, HEAD_METRICS
from foreshock.contract.incident import Incident
from foreshock.contract.labels import DROP_REASONS, FAULT_COMPONENTS, OTHER, SIGNALS, known
from foreshock.contract.modes import is_mode
from foreshock.server.curves.merging import Axis, MergedSteps, merge
from foreshock.server.models import ActiveWarning
from foreshock.server.runs.incidents import incidents_of
from foreshock.server.runs.listing import active_warnings, health_totals, status_of
from foreshock.server.runs.newest import newest_samples
from foreshock.server.store import process_starts
from foreshock.server.store.schema import boots, events, warnings

Labels = tuple[str, ...]
Entry = tuple[str, Labels, float]
"""(metric name, label values, value)."""
_SEVERITIES: Final = ("critical", "warning", "info")


@dataclass
class RunSeries:
    """What is shown of a run, by how much it is needed."""

    finished: bool
    urgent: list[list[Entry]] = field(default_factory=list)
    """State, step, incidents and the worst warning; then one more warning each."""
    whole: list[Entry] = field(default_factory=list)
    layers: list[Entry] = field(default_factory=list)
    heads: list[Entry] = field(default_factory=list)


@dataclass
class RunRows:
    """What the store knows of a run, from which its series are made."""

    name: str
    boots: list[Row[Any]] = field(default_factory=list)
    raised: list[ActiveWarning] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    newest: tuple[Axis, list[Row[Any]]] | None = None
    causes: Counter[str] = field(default_factory=Counter)
    switches: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(mode, outcome) of every switch."""


async def read_rows(connection: AsyncConnection, rows: Sequence[Row[Any]], verify_steps: int) -> dict[int, RunRows]:
    """Read these runs, by id: in as many queries for many as for one. verify_steps: as for `incidents_of`."""
    found = {row.id: RunRows(row.name) for row in rows}
    for boot in await connection.execute(select(boots).where(boots.c.run_id.in_(found))):
        found[boot.run_id].boots.append(boot)
    for run_id, raised in (await active_warnings(connection, list(found))).items():
        found[run_id].raised = raised
    newest = await newest_samples(connection, list(found))
    for run_id, own in newest.items():
        found[run_id].newest = own
    starts = {run_id: run.boots for run_id, run in found.items() if run.raised}
    made = await incidents_of(connection, list(starts), verify_steps, starts=starts, newest=newest)
    for run_id, incidents in made.items():
        found[run_id].incidents = [one for one in incidents if one.state != "closed"]
    causes = select(warnings.c.run_id, warnings.c.cause, func.count()).where(warnings.c.run_id.in_(found))
    for run_id, cause, count in await connection.execute(causes.group_by(warnings.c.run_id, warnings.c.cause)):
        found[run_id].causes[cause] += count
    key = events.c.run_id, events.c.mode, events.c.outcome
    outcomes = select(*key, func.count()).where(events.c.run_id.in_(found), events.c.kind == "switched")
    for run_id, mode, outcome, count in await connection.execute(outcomes.group_by(*key)):
        named = mode if not mode or is_mode(mode) else OTHER
        found[run_id].switches[named or "", outcome] += count
    return found


def series_of(rows: RunRows, worst_heads: int) -> RunSeries:
    """The series of a run; work for the processor, best done beside the event loop."""
    series = RunSeries(finished=status_of(rows.boots) != "active")
    reading = None
    if rows.newest is not None:
        axis, own = rows.newest
        reading = merge(axis, own)
        _add_heads(series, rows.name, axis, reading, worst_heads)
    _add_urgent(series, rows, reading)
    _add_whole(series, rows, reading)
    return series


def _add_urgent(series: RunSeries, rows: RunRows, reading: MergedSteps | None) -> None:
    name = rows.name
    first: list[Entry] = [(BY_KEY["run.active"].name, (name,), float(not series.finished))]
    if reading is not None:
        first.append((BY_KEY["run.step"].name, (name,), float(reading.steps[-1])))
    for incident in rows.incidents:
        first += _of_incident(name, incident)
    shown: list[list[Entry]] = []
    for warning in sorted(rows.raised, key=lambda w: _SEVERITIES.index(w.severity)):
        where = name, _text(warning.layer), _text(warning.head)
        signal = known(warning.signal, SIGNALS)
        told: list[Entry] = [
            (BY_KEY["warning.active"].name, (*where, warning.cause, signal, warning.severity), 1.0),
        ]
        if warning.forecast_steps is not None:
            told.append((BY_KEY["warning.forecast"].name, where, warning.forecast_steps))
        shown.append(told)
    series.urgent = [first + (shown[0] if shown else []), *shown[1:]]


def _of_incident(run: str, incident: Incident) -> list[Entry]:
    where = run, incident.cause
    state = "open" if incident.state == "acknowledged" else incident.state  # told apart by a series of its own
    told: list[Entry] = [
        (BY_KEY["incident.active"].name, (*where, state, incident.severity, incident.act), 1.0),
        (BY_KEY["incident.heads"].name, where, float(incident.standing)),
        (BY_KEY["incident.acknowledged"].name, where, float(incident.acknowledged is not None)),
    ]
    if incident.steps_left is not None:
        told.append((BY_KEY["incident.forecast"].name, where, incident.steps_left))
    return told


def _add_whole(series: RunSeries, rows: RunRows, reading: MergedSteps | None) -> None:
    def add(key: str, value: float | None, *labels: str) -> None:
        if value is not None:
            series.whole.append((BY_KEY[key].name, (rows.name, *labels), value))

    by_rank: Counter[int] = Counter()
    for boot in rows.boots:
        by_rank[boot.rank] += boot.nonfinite_steps
    add("run.nonfinite_steps", float(max(by_rank.values(), default=0)))
    dropped, faults = health_totals(rows.boots)
    # a zero, so that a panel of a good run is not empty
    for reason, count in _by_known({"queue_full": 0, **dropped}, DROP_REASONS).items():
        add("agent.dropped", float(count), reason)
    for component, count in _by_known({"sender": 0, **faults}, FAULT_COMPONENTS).items():
        add("agent.faults", float(count), component)
    living = process_starts.newest(rows.boots).values()
    add("run.last_heard", max((boot.last_seen for boot in living), default=None))
    add("run.last_step", max((boot.stepped for boot in living if boot.stepped is not None), default=None))
    if reading is not None:
        for key, value in reading.latest().items():
            add(key, value)
    for cause, count in rows.causes.items():
        add("warning.raised", float(count), cause)
    for (mode, outcome), count in rows.switches.items():
        add("switch.outcomes", float(count), mode, outcome)


def _by_known(counts: dict[str, int], words: Collection[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for word, count in counts.items():
        found[known(word, words)] += max(0, count)
    return found


def _add_heads(series: RunSeries, run: str, axis: Axis, reading: MergedSteps, worst_heads: int) -> None:
    values = {metric: reading.head_values(metric)[-1] for metric in HEAD_METRICS}
    layers = np.array([layer for layer, _ in axis.heads])
    for metric, of_heads in values.items():
        for layer in axis.layers:
            own = of_heads[layers == layer]
            own = own[~np.isnan(own)]
            if own.size:
                worst = own[np.argmax(metric.badness(own))]
                series.layers.append((metric.layer_name, (run, str(layer)), float(worst)))
    for i in worst_first(values[BY_KEY["head.risk"]], values[BY_KEY["head.row_max_abs"]])[:worst_heads]:
        layer, head = axis.heads[i]
        for metric, of_heads in values.items():
            if not math.isnan(of_heads[i]):
                series.heads.append((metric.name, (run, str(layer), str(head)), float(of_heads[i])))


def worst_first(risk: Any, size: Any) -> list[int]:
    """Heads by risk, then by their largest |row maximum|, then by number; those with neither are left out."""
    told = [i for i in range(len(risk)) if not (math.isnan(risk[i]) and math.isnan(size[i]))]
    return sorted(told, key=lambda i: (-np.nan_to_num(risk[i], nan=-1.0), -np.nan_to_num(size[i], nan=-1.0), i))


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
