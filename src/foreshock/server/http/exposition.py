"""GET /metrics, derived from the catalogue: the service itself, runs, one value per layer, and the worst heads.

Label values come from closed sets and from names that the wire format has checked. The number of series is bounded:
state, step and warnings of every run come first, in rounds, with tenants in turn; then the other metrics of runs,
layers and heads. The order is the same at every scrape, except for the worst heads, which are sorted by risk; series
beyond the budget are left out and counted. The series of a run are cached until the run changes. Values that the newest
sample lacks are shown as last measured.
"""

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from sqlalchemy import Connection, Row, func, select

from foreshock.contract.incident import Incident
from foreshock.contract.metrics.catalog import BY_KEY, METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import DROP_REASONS, FAULT_COMPONENTS, OTHER, SIGNALS, known
from foreshock.contract.modes import is_mode
from foreshock.contract.slots import Floats
from foreshock.contract.wire import SEVERITIES, Clipped
from foreshock.server import commands
from foreshock.server.auth import Keyring
from foreshock.server.logs import Counters, lines
from foreshock.server.models import ActiveWarning
from foreshock.server.notifier import words_of
from foreshock.server.readings import Axis, MergedSteps, read_back, unreadable
from foreshock.server.runs.current import NORMS, Earlier, Losses, RunNow, carry, earlier_samples, losses, runs_now
from foreshock.server.runs.ranks import status_of
from foreshock.server.settings import Settings
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, give_up_if_cancelled
from foreshock.server.store.schema import events, runs, service_state, warnings

Labels = tuple[str, ...]
Line = tuple[str, str]
"""(metric name, its sample as text)."""


def _families() -> Iterable[tuple[str, Family, Labels]]:
    for metric in METRICS:
        yield metric.name, Family(metric.name.removesuffix("_total"), metric.help, metric.kind), metric.labels
        if metric.head is not None:
            text = f"{metric.help} Value of the layer's worst head."
            yield metric.layer_name, Family(metric.layer_name, text, metric.kind), ("run", "layer")


_FAMILIES: Final = {name: family for name, family, _ in _families()}
_ORDER: Final = {name: sorted(range(len(labels)), key=labels.__getitem__) for name, _, labels in _families()}
"""The order of each metric's labels by name, as prometheus_client writes them."""
_SAMPLE: Final = {
    name: f"{name}{{" + ",".join(f'{label}="%s"' for label in sorted(labels)) + "} %s\n" if labels else f"{name} %s\n"
    for name, _, labels in _families()
}
_PLAIN: Final = 1e6
"""Numbers below this size are written with `repr`, which gives the same text as prometheus_client."""
_TO_ESCAPE: Final = re.compile(r'[\\"\n]')


def line(name: str, labels: Labels, value: float) -> Line:
    """Format a sample; `labels` are in the order of the catalogue."""
    own = [labels[place] for place in _ORDER[name]]
    if _TO_ESCAPE.search("".join(own)):
        own = [text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for text in own]
    plain = -_PLAIN < value < _PLAIN  # avoids floatToGoString, which checks every number for rare cases
    number = repr(value) if plain else floatToGoString(value)  # type: ignore[no-untyped-call]
    return name, _SAMPLE[name] % (*own, number)


class _Families(Collector):
    """Families without samples, so that prometheus_client writes only their HELP and TYPE lines."""

    def __init__(self, *families: Family) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def encoder(accept: str) -> tuple[Callable[[Mapping[str, Sequence[str]]], bytes], str]:
    """Return a function that encodes lines by metric, and the content type, for the Accept header of a scraper."""
    # Escaping by dots would change valid names too, but the lines are cached for all scrapers, so it is not offered.
    heads, content_type = choose_encoder(accept.replace("escaping=dots", "escaping=underscores"))

    def encode(lines: Mapping[str, Sequence[str]]) -> bytes:
        end = heads(_Families())
        parts = []
        for name, family in _FAMILIES.items():
            if own := lines.get(name):
                parts += [heads(_Families(family)).removesuffix(end), "".join(own).encode()]
        return b"".join([*parts, end])

    return encode, content_type


_HEAD_NAMES: Final = tuple(metric.name for metric in HEAD_METRICS)
_LAYER_NAMES: Final = tuple(metric.layer_name for metric in HEAD_METRICS)
_RISK, _SIZE = (HEAD_METRICS.index(BY_KEY[key]) for key in ("head.risk", "head.row_max_abs"))


@dataclass
class Table:
    """Per-head metrics of some layers or heads, formatted only on demand: of thousands of runs few fit the budget."""

    names: Sequence[str]
    labels: Sequence[Labels]
    values: Floats
    """[places, names]; NaN if nothing was counted."""

    def __len__(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.values)))

    def __iter__(self) -> Iterator[Line]:
        for place, name in np.argwhere(~np.isnan(self.values)).tolist():
            yield line(self.names[name], self.labels[place], float(self.values[place, name]))

    @cached_property
    def lines(self) -> list[Line]:
        """The formatted lines, cached from the first scrape whose budget includes them."""
        return list(self)


def head_tables(run: str, axis: Axis, reading: MergedSteps, worst_heads: int) -> tuple[Table, Table]:
    """Return a run's last step: a table of layers, and one of the worst heads. The run must have heads."""
    values = np.stack([reading.head_values(metric)[-1] for metric in HEAD_METRICS], axis=1)
    some = _worst_first(values[:, _RISK], values[:, _SIZE])[:worst_heads]
    labels = [(run, *map(str, axis.heads[i])) for i in some.tolist()]
    layers = Table(_LAYER_NAMES, [(run, str(layer)) for layer in axis.columns], _worst_of_layers(axis, values))
    return layers, Table(_HEAD_NAMES, labels, values[some])


def _worst_of_layers(axis: Axis, values: Floats) -> Floats:
    """Return [layers, metrics]: the value of each layer's worst head, the first of equal ones; NaN if none has one."""
    bad = np.stack([metric.badness(values[:, i]) for i, metric in enumerate(HEAD_METRICS)], axis=1)
    size = np.where(np.isnan(values), -np.inf, np.maximum(bad, np.finfo(np.float64).min))  # -inf is worse than none
    worst = np.array([own.start + size[own].argmax(axis=0) for own in axis.columns.values()])
    found: Floats = np.take_along_axis(values, worst, axis=0)
    return found


def _worst_first(risk: Floats, size: Floats) -> npt.NDArray[np.intp]:
    """Sort heads by risk, by their largest |row maximum|, and by number; heads without both are left out."""
    order: npt.NDArray[np.intp] = np.lexsort((-np.nan_to_num(size, nan=-1.0), -np.nan_to_num(risk, nan=-1.0)))
    measured: npt.NDArray[np.intp] = order[~(np.isnan(risk) & np.isnan(size))[order]]
    return measured


Entry = tuple[str, float | None, *tuple[str, ...]]
"""(metric's key, value, label values after the run's name); an entry whose value is None is left out."""
_NAMES: Final = {metric.key: metric.name for metric in METRICS}


@dataclass
class RunSeries:
    """The series of a run, the most needed first."""

    finished: bool
    urgent: list[list[Line]] = field(default_factory=list)
    """Rounds: first state, step, the first incident and the worst warning; then one more incident and warning each."""
    whole: list[Line] = field(default_factory=list)
    layers: Table | None = None
    heads: Table | None = None


@dataclass
class RunRows:
    """The stored data from which the series of a run are made."""

    now: RunNow
    lost: Losses
    earlier: Earlier | None
    """Samples with the values that the newest reading lacks."""
    causes: Counter[str] = field(default_factory=Counter)
    switches: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(mode, outcome) of every switch."""
    clips: float | None = None
    """How often QK-Clip scaled a head, from the newest event of each rank."""


def read_rows(connection: Connection, rows: Sequence[Row[Any]], verify_steps: int) -> dict[int, RunRows]:
    """Read these runs, by id, with a fixed number of queries. verify_steps: as for `incidents_of`."""
    lost, known = losses(connection, [row.id for row in rows]), runs_now(connection, rows, verify_steps)
    earlier = earlier_samples(connection, {now.row.id: now.newest for now in known if now.newest is not None})
    found = {now.row.id: RunRows(now, lost[now.row.id], earlier.get(now.row.id)) for now in known}
    causes = select(warnings.c.run_id, warnings.c.cause, func.count()).where(warnings.c.run_id.in_(found))
    for run_id, cause, count in connection.execute(causes.group_by(warnings.c.run_id, warnings.c.cause)):
        found[run_id].causes[cause] += count
    own = events.c.run_id.in_(found)
    key = events.c.run_id, events.c.mode, events.c.outcome
    switched = select(*key, func.count()).where(own, events.c.kind == "switched").group_by(*key)
    for run_id, mode, outcome, count in connection.execute(switched):
        found[run_id].switches["" if not mode else mode if is_mode(mode) else OTHER, outcome] += count
    last = select(func.max(events.c.id)).where(own, events.c.kind == "clipped").group_by(events.c.run_id, events.c.rank)
    for event in connection.execute(select(events).where(events.c.id.in_(last))):
        if (recorded := read_back(Clipped, event.payload, "event", event.id)) is not None:
            found[event.run_id].clips = (found[event.run_id].clips or 0.0) + recorded.total
    return found


def series_of(rows: RunRows, worst_heads: int) -> RunSeries:
    """Return the series of a run."""
    reading = rows.now.reading
    norms_step = None
    series = RunSeries(finished=status_of(rows.now.starts) != "active")
    if reading is not None and rows.now.newest is not None:
        axis, _ = rows.now.newest
        if any(not np.isnan(reading.fields[name][-1]).all() for name in NORMS):
            norms_step = int(reading.steps[-1])
        if rows.earlier is not None:
            carried = carry(axis, reading, rows.earlier)
            norms_step = carried if norms_step is None else norms_step
        if axis.heads:
            series.layers, series.heads = head_tables(rows.now.row.name, axis, reading, worst_heads)
    written: set[tuple[str, Labels]] = set()
    run, urgent = rows.now.row.name, _urgent(rows.now, finished=series.finished)
    series.urgent = [_lines(run, entries, written) for entries in urgent]
    series.whole = _lines(run, _whole(rows, reading, norms_step), written)
    return series


def _lines(run: str, entries: Iterable[Entry], written: set[tuple[str, Labels]]) -> list[Line]:
    """Format these series of a run, except those that were written already."""
    made = []
    for key, value, *labels in entries:
        name, own = _NAMES[key], (run, *labels)
        if value is not None and (name, own) not in written:
            written.add((name, own))
            made.append(line(name, own, value))
    return made


def _urgent(now: RunNow, *, finished: bool) -> list[list[Entry]]:
    step = None if now.reading is None else float(now.reading.steps[-1])
    first: list[Entry] = [("run.active", float(not finished)), ("run.step", step)]
    raised = sorted(now.raised, key=lambda w: -SEVERITIES.index(w.severity))
    of_each = map(partial(_of_incident, now.row.name), now.incidents), map(_of_warning, raised)
    rounds = [[*incident, *warning] for incident, warning in zip_longest(*of_each, fillvalue=())]
    return [first + (rounds[0] if rounds else []), *rounds[1:]]


def _of_warning(warning: ActiveWarning) -> Iterator[Entry]:
    where = _text(warning.layer), _text(warning.head)
    yield "warning.active", 1.0, *where, warning.cause, known(warning.signal, SIGNALS), warning.severity
    yield "warning.forecast", warning.forecast_steps, *where


def _of_incident(run: str, incident: Incident) -> Iterator[Entry]:
    cause = incident.cause
    state = "open" if incident.state == "acknowledged" else incident.state  # incident.acknowledged shows that
    yield "incident.active", 1.0, cause, state, incident.severity, incident.act
    yield "incident.words", 1.0, cause, *words_of(run, incident)
    yield "incident.heads", float(incident.standing_heads), cause
    yield "incident.opened_step", float(incident.opened_step), cause
    yield "incident.acknowledged", float(incident.acknowledged is not None), cause
    if incident.corrected_from is not None and incident.corrected_step is not None:
        yield "incident.corrected_step", float(incident.corrected_step), cause, incident.corrected_from
    yield "incident.forecast", incident.steps_left, cause


def _whole(rows: RunRows, reading: MergedSteps | None, norms_step: int | None) -> Iterator[Entry]:
    yield "run.norms_step", norms_step
    yield "run.nonfinite_steps", float(rows.lost.nonfinite_steps)
    # a zero, so that the panel of a healthy run is not empty
    for reason, count in _by_known({"queue_full": 0, **rows.lost.dropped}, DROP_REASONS):
        yield "agent.dropped", float(count), reason
    for component, count in _by_known({"sender": 0, **rows.lost.faults}, FAULT_COMPONENTS):
        yield "agent.faults", float(count), component
    living = process_starts.newest(rows.now.starts).values()
    yield "run.last_heard", max((boot.last_seen for boot in living), default=None)
    yield "run.last_step", max((boot.stepped for boot in living if boot.stepped is not None), default=None)
    if reading is not None:
        yield from reading.latest().items()
        clipped = reading.fields["clipped_steps"][-1]
        yield "run.clipped_heads", None if np.isnan(clipped).all() else float(np.nansum(clipped > 0))
    yield "run.clips", rows.clips
    for cause, count in sorted(rows.causes.items()):
        yield "warning.raised", float(count), cause
    for (mode, outcome), count in sorted(rows.switches.items()):
        yield "switch.outcomes", float(count), mode, outcome


def _by_known(counts: dict[str, int], words: Collection[str]) -> list[tuple[str, int]]:
    found: Counter[str] = Counter()
    for word, count in counts.items():
        found[known(word, words)] += max(0, count)
    return sorted(found.items())  # so that the budget cuts a run at the same place at every scrape


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


log = structlog.get_logger()
_RUNS_AT_ONCE: Final = 64
"""Runs whose newest samples are in memory at the same time."""


@dataclass
class Exposition:
    """Lines by metric name, filled run by run until the budget is spent."""

    budget: int
    lines: defaultdict[str, list[str]] = field(default_factory=partial(defaultdict, list))
    dropped: int = 0
    used: int = 0

    def add(self, key: str, value: float | None, *labels: str) -> None:
        """Add a metric of the service itself, by its key; nothing if the value is None."""
        if value is not None:
            self.extend([line(BY_KEY[key].name, labels, value)])

    def set(self, key: str, value: float) -> None:
        """Set a metric without labels, replacing an earlier value; the budget does not apply."""
        name, text = line(BY_KEY[key].name, (), value)
        self.lines[name] = [text]

    def extend(self, lines: Sequence[Line]) -> None:
        """Add new series in this order, up to the budget."""
        room = max(0, self.budget - self.used)
        if room < len(lines):
            self.dropped += len(lines) - room
            lines = lines[:room]
        self.used += len(lines)
        for name, text in lines:
            self.lines[name].append(text)


class Exposer:
    """Answers scrapes. Scrapes within `metrics_seconds` share one snapshot, so many scrapers cost as much as one."""

    def __init__(self, store: Store, settings: Settings, counters: Counters, keyring: Keyring) -> None:
        self._store, self._settings, self._counters, self._keyring = store, settings, counters, keyring
        self._taken: dict[str, tuple[float, Exposition]] = {}
        self._made: dict[int, tuple[int, RunSeries]] = {}
        self._taking = asyncio.Lock()

    async def expose(self, accept: str, prefix: str) -> tuple[bytes, str]:
        """Return the body of /metrics and its content type, for the Accept header of the scraper."""
        async with self._taking:
            now = time.monotonic()
            life = self._settings.metrics_seconds
            self._taken = {known: taken for known, taken in self._taken.items() if now - taken[0] < life}
            if prefix not in self._taken:
                self._taken[prefix] = now, await self._store.read(partial(self._take, prefix=prefix))
            exposition = self._taken[prefix][1]
        encode, content_type = encoder(accept)
        return await asyncio.to_thread(encode, exposition.lines), content_type

    def _take(self, connection: Connection, prefix: str) -> Exposition:
        exposition, now = Exposition(self._settings.max_series), time.time()
        if not prefix:  # the service's own counters include all tenants
            _add_service(connection, exposition, self._store, self._counters)
        since = now - max(self._settings.finished_run_seconds, self._settings.silent_run_seconds)
        known = connection.execute(select(runs).where(runs.c.last_seen >= since)).all()
        made = self._made = {row.id: self._made[row.id] for row in known if row.id in self._made}
        per_run = {
            "service.commands_pending": commands.pending_by_run(connection),
            "switch.not_arrested": commands.not_arrested_by_run(connection),
        }
        rows = [row for row in known if row.name.startswith(prefix)]
        changed = [row for row in rows if made.get(row.id, (None,))[0] != row.changes]
        for first in range(0, len(changed), _RUNS_AT_ONCE):
            give_up_if_cancelled(connection)
            some = changed[first : first + _RUNS_AT_ONCE]
            found = self.read_changed(connection, some)
            made |= {row.id: (row.changes, self._series_of(found[row.id])) for row in some}
        shown = [(row, made[row.id][1]) for row in rows if self._is_shown(row, made[row.id][1], now)]
        _fill(exposition, self._in_turns(shown), per_run)
        exposition.set("service.series_dropped", float(exposition.dropped))
        if not prefix:
            exposition.set("service.unreadable_rows", float(len(unreadable)))  # now that the runs have been read
            self._counters.series_dropped = exposition.dropped
        return exposition

    def _in_turns(self, shown: Sequence[tuple[Row[Any], RunSeries]]) -> list[tuple[Row[Any], RunSeries]]:
        """Sort runs: active ones first, tenants in turn, the oldest first.

        So new runs do not displace old ones, nor many runs of one tenant those of another. A tenant is the set of runs
        whose names begin with the same `run_prefix` of a token.
        """
        prefixes = sorted({token.run_prefix for token in self._keyring.tokens}, key=len, reverse=True)
        turns: Counter[tuple[str, bool]] = Counter()
        placed: list[tuple[bool, int, int, Row[Any], RunSeries]] = []
        for row, series in sorted(shown, key=lambda run: (run[0].first_seen, run[0].id)):
            tenant = next((prefix for prefix in prefixes if row.name.startswith(prefix)), "")
            turns[tenant, series.finished] += 1
            placed.append((series.finished, turns[tenant, series.finished], len(placed), row, series))
        return [(row, series) for *_, row, series in sorted(placed, key=lambda place: place[:3])]

    def _series_of(self, rows: RunRows) -> RunSeries:
        try:
            return series_of(rows, self._settings.worst_heads)
        except Exception:  # one run must not break the scrape of the others
            log.exception("a run cannot be shown in /metrics", run=rows.now.row.name)
            return RunSeries(finished=False)

    def read_changed(self, connection: Connection, rows: Sequence[Row[Any]]) -> dict[int, RunRows]:
        """Read the stored data of runs that changed."""
        return read_rows(connection, rows, self._settings.verify_steps)

    def _is_shown(self, row: Row[Any], series: RunSeries, now: float) -> bool:
        life = self._settings.finished_run_seconds if series.finished else self._settings.silent_run_seconds
        return bool(now - row.last_seen <= life)


def _fill(
    exposition: Exposition, shown: Sequence[tuple[Row[Any], RunSeries]], per_run: dict[str, dict[int, int]]
) -> None:
    """Add the series of runs, in this order, until the budget is used up."""
    for own in range(max((len(series.urgent) for _, series in shown), default=0)):
        for _, series in shown:
            if own < len(series.urgent):
                exposition.extend(series.urgent[own])
    for key, counts in per_run.items():
        name = BY_KEY[key].name
        for row, _ in shown:
            exposition.extend([line(name, (row.name,), float(counts.get(row.id, 0)))])
    for _, series in shown:
        exposition.extend(series.whole)
    for table in [*(series.layers for _, series in shown), *(series.heads for _, series in shown)]:
        if table is None:
            continue
        if exposition.used >= exposition.budget:
            exposition.dropped += len(table)
        else:
            exposition.extend(table.lines)


def _add_service(connection: Connection, exposition: Exposition, store: Store, counters: Counters) -> None:
    add = exposition.add
    for result, count in sorted(counters.batches.items()):
        add("service.batches", count, result)
    for what, count in sorted(counters.refusals.items()):
        add("service.refusals", count, what)
    for (sender, result), count in sorted(counters.webhooks.items()):
        add("service.webhooks", count, sender, result)
    add("service.commit", counters.commit_seconds)
    add("service.store", store.size_bytes(connection))
    add("service.log_lines_dropped", float(lines["left out"]))
    add("service.unreadable_rows", float(len(unreadable)))  # reserves its place in the budget; set again at the end
    watchdog = select(service_state.c.value).where(service_state.c.key == "watchdog")
    add("service.watchdog", connection.execute(watchdog).scalar())
