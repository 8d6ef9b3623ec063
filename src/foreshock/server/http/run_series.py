"""The time series of runs, by how much they are needed: alerts first, single heads last."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, case, func, select

from foreshock.contract.incident import Incident
from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.metric import DROP_REASONS, FAULT_COMPONENTS, OTHER, SIGNALS, known
from foreshock.contract.modes import is_mode
from foreshock.contract.wire import Clipped
from foreshock.server.curves.merging import Axis, MergedSteps, merge
from foreshock.server.http.head_tables import Table
from foreshock.server.http.lines import Labels, Line, line
from foreshock.server.messages import words_of
from foreshock.server.models import ActiveWarning
from foreshock.server.runs.incidents import incidents_of
from foreshock.server.runs.last_measured import NORMS, Earlier, carry, earlier_samples
from foreshock.server.runs.listing import Losses, active_warnings, losses
from foreshock.server.runs.newest import newest_samples, status_of
from foreshock.server.store import process_starts
from foreshock.server.store.reading import read_back
from foreshock.server.store.schema import events, warnings

Entry = tuple[str, Labels, float]
"""(metric name, label values, value)."""
_NAMES: Final = {metric.key: metric.name for metric in METRICS}
_SEVERITIES: Final = ("critical", "warning", "info")


@dataclass
class RunSeries:
    """What is shown of a run, by how much it is needed."""

    finished: bool
    urgent: list[list[Line]] = field(default_factory=list)
    """State, step, an incident and the worst warning; then one more of each."""
    whole: list[Line] = field(default_factory=list)
    layers: Table | None = None
    heads: Table | None = None


@dataclass
class RunRows:
    """What the store knows of a run, from which its series are made."""

    name: str
    boots: list[Row[Any]] = field(default_factory=list)
    """The process starts of now."""
    lost: Losses = field(default_factory=Losses)
    raised: list[ActiveWarning] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    newest: tuple[Axis, list[Row[Any]]] | None = None
    earlier: Earlier | None = None
    """Samples with what the newest reading lacks."""
    causes: Counter[str] = field(default_factory=Counter)
    switches: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(mode, outcome) of every switch."""
    clips: float | None = None
    """How often QK-Clip scaled a head, as the newest word of each rank has it."""


def read_rows(connection: Connection, rows: Sequence[Row[Any]], verify_steps: int) -> dict[int, RunRows]:
    """Read these runs, by id: in as many queries for many as for one. verify_steps: as for `incidents_of`."""
    found = {row.id: RunRows(row.name) for row in rows}
    for run_id, starts_now in process_starts.of_now(connection, found).items():
        found[run_id].boots = starts_now
    for run_id, lost in losses(connection, found).items():
        found[run_id].lost = lost
    for run_id, raised in active_warnings(connection, list(found)).items():
        found[run_id].raised = raised
    newest = newest_samples(connection, list(found))
    for run_id, own in newest.items():
        found[run_id].newest = own
    for run_id, earlier in earlier_samples(connection, newest).items():
        found[run_id].earlier = earlier
    starts = {run_id: run.boots for run_id, run in found.items() if run.raised}
    made = incidents_of(connection, list(starts), verify_steps, starts=starts, newest=newest)
    for run_id, incidents in made.items():
        found[run_id].incidents = [one for one in incidents if one.state != "closed"]
    causes = select(warnings.c.run_id, warnings.c.cause, func.count()).where(warnings.c.run_id.in_(found))
    for run_id, cause, count in connection.execute(causes.group_by(warnings.c.run_id, warnings.c.cause)):
        found[run_id].causes[cause] += count
    clips = events.c.kind == "clipped"
    key = events.c.run_id, events.c.mode, events.c.outcome, case((clips, events.c.rank))
    counts = select(*key, func.count(), func.max(case((clips, events.c.id)))).where(events.c.run_id.in_(found))
    clipped = []
    for run_id, mode, outcome, _, count, newest in connection.execute(
        counts.where(events.c.kind.in_(("switched", "clipped"))).group_by(*key, clips)
    ):
        if newest is not None:
            clipped.append(newest)
            continue
        named = mode if not mode or is_mode(mode) else OTHER
        found[run_id].switches[named or "", outcome] += count
    if clipped:
        for event in connection.execute(select(events).where(events.c.id.in_(clipped))):
            if (recorded := read_back(Clipped, event.payload, "event", event.id)) is not None:
                found[event.run_id].clips = (found[event.run_id].clips or 0.0) + recorded.total
    return found


def series_of(rows: RunRows) -> tuple[RunSeries, MergedSteps | None]:
    """The series of a run, but for its tables, and its newest reading."""
    reading = merge(*rows.newest) if rows.newest is not None else None
    norms_step = None
    if reading is not None and rows.newest is not None:
        if any(not np.isnan(reading.fields[name][-1]).all() for name in NORMS):
            norms_step = int(reading.steps[-1])
        if rows.earlier is not None:
            carried = carry(rows.newest[0], reading, rows.earlier)
            norms_step = carried if norms_step is None else norms_step
    series = RunSeries(finished=status_of(rows.boots) != "active")
    written: set[tuple[str, Labels]] = set()
    series.urgent = [_lines(entries, written) for entries in _urgent(rows, reading, finished=series.finished)]
    series.whole = _lines(_whole(rows, reading, norms_step), written)
    return series, reading


def _lines(entries: Iterable[Entry], written: set[tuple[str, Labels]]) -> list[Line]:
    """The lines of these series as text, without those that the run has already."""
    made = []
    for name, labels, value in entries:
        if (name, labels) not in written:
            written.add((name, labels))
            made.append(line(name, labels, value))
    return made


def _urgent(rows: RunRows, reading: MergedSteps | None, *, finished: bool) -> list[list[Entry]]:
    name = rows.name
    first: list[Entry] = [(_NAMES["run.active"], (name,), float(not finished))]
    if reading is not None:
        first.append((_NAMES["run.step"], (name,), float(reading.steps[-1])))
    incidents = [_of_incident(name, incident) for incident in rows.incidents]
    shown: list[list[Entry]] = []
    for warning in sorted(rows.raised, key=lambda w: _SEVERITIES.index(w.severity)):
        where = name, _text(warning.layer), _text(warning.head)
        signal = known(warning.signal, SIGNALS)
        entries: list[Entry] = [
            (_NAMES["warning.active"], (*where, warning.cause, signal, warning.severity), 1.0),
        ]
        if warning.forecast_steps is not None:
            entries.append((_NAMES["warning.forecast"], where, warning.forecast_steps))
        shown.append(entries)
    rounds = [[*incident, *warning] for incident, warning in zip_longest(incidents, shown, fillvalue=())]
    return [first + (rounds[0] if rounds else []), *rounds[1:]]


def _of_incident(run: str, incident: Incident) -> list[Entry]:
    where = run, incident.cause
    state = "open" if incident.state == "acknowledged" else incident.state  # a series of its own shows that
    entries: list[Entry] = [
        (_NAMES["incident.active"], (*where, state, incident.severity, incident.act), 1.0),
        (_NAMES["incident.words"], (*where, *words_of(run, incident)), 1.0),
        (_NAMES["incident.heads"], where, float(incident.standing_heads)),
        (_NAMES["incident.opened_step"], where, float(incident.opened_step)),
        (_NAMES["incident.acknowledged"], where, float(incident.acknowledged is not None)),
    ]
    if incident.corrected_from is not None and incident.corrected_step is not None:
        corrected = (*where, incident.corrected_from)
        entries.append((_NAMES["incident.corrected_step"], corrected, float(incident.corrected_step)))
    if incident.steps_left is not None:
        entries.append((_NAMES["incident.forecast"], where, incident.steps_left))
    return entries


def _whole(rows: RunRows, reading: MergedSteps | None, norms_step: int | None) -> list[Entry]:
    whole: list[Entry] = []

    def add(key: str, value: float | None, *labels: str) -> None:
        if value is not None:
            whole.append((_NAMES[key], (rows.name, *labels), value))

    add("run.norms_step", norms_step)
    add("run.nonfinite_steps", float(rows.lost.nonfinite_steps))
    # a zero, so that a panel of a good run is not empty
    for reason, count in _by_known({"queue_full": 0, **rows.lost.dropped}, DROP_REASONS).items():
        add("agent.dropped", float(count), reason)
    for component, count in _by_known({"sender": 0, **rows.lost.faults}, FAULT_COMPONENTS).items():
        add("agent.faults", float(count), component)
    living = process_starts.newest(rows.boots).values()
    add("run.last_heard", max((boot.last_seen for boot in living), default=None))
    add("run.last_step", max((boot.stepped for boot in living if boot.stepped is not None), default=None))
    if reading is not None:
        for key, value in reading.latest().items():
            add(key, value)
        clipped = reading.fields["clipped_steps"][-1]
        add("run.clipped_heads", None if np.isnan(clipped).all() else float(np.nansum(clipped > 0)))
    add("run.clips", rows.clips)
    for cause, count in rows.causes.items():
        add("warning.raised", float(count), cause)
    for (mode, outcome), count in rows.switches.items():
        add("switch.outcomes", float(count), mode, outcome)
    return whole


def _by_known(counts: dict[str, int], words: Collection[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for word, count in counts.items():
        found[known(word, words)] += max(0, count)
    return found


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
