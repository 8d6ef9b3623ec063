"""GET /metrics, derived from the catalogue: the worst heads, one value per layer, runs, and the service itself.

Labels come from identifiers that the wire format has checked, and the number of series is bounded: what does not fit
into the budget is left out, the oldest runs first, and counted.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from sqlalchemy import Row, desc, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, HEAD_METRICS, METRICS
from foreshock.contract.metric import Metric
from foreshock.server.commands import lifecycle as commands
from foreshock.server.counters import Counters
from foreshock.server.curves.merging import Axis, Readings
from foreshock.server.models import ActiveWarning
from foreshock.server.runs.listing import active_warnings, health_totals, newest_boots, newest_readings, status_of
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store
from foreshock.server.store.reading import unreadable
from foreshock.server.store.schema import boots, events, runs, service_state, warnings

Labels = tuple[str, ...]


@dataclass
class Exposition:
    """Values by metric name, filled run by run until the budget is spent."""

    budget: int
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    dropped: int = 0
    used: int = 0

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """Add one series, or count it as dropped. None and series that are there already are left out."""
        if value is None or labels in self.values.setdefault(name, {}):
            return
        if self.used >= self.budget:
            self.dropped += 1
            return
        self.used += 1
        self.values[name][labels] = value


class _Snapshot(Collector):
    """Hands an exposition to prometheus_client."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    def collect(self) -> Iterable[Family]:
        for metric in METRICS:
            yield from self._families(metric, metric.name, metric.help, metric.labels)
            if metric.head is not None:
                text = f"{metric.help} Value of the layer's worst head."
                yield from self._families(metric, metric.layer_name, text, ("run", "layer"))

    def _families(self, metric: Metric, name: str, text: str, labels: Labels) -> Iterator[Family]:
        values = self._exposition.values.get(name)
        if not values:
            return
        family: GaugeMetricFamily | CounterMetricFamily
        if metric.kind == "counter":
            family = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
        else:
            family = GaugeMetricFamily(name, text, labels=labels)
        for label_values, value in sorted(values.items()):
            family.add_metric(label_values, value)
        yield family


class Exposer:
    """Answers scrapes. A snapshot serves everybody who asks within `metrics_seconds`: many scrapers cost one."""

    def __init__(self, store: Store, settings: Settings, counters: Counters) -> None:
        self._store, self._settings, self._counters = store, settings, counters
        self._taken: dict[str, tuple[float, Exposition]] = {}
        self._taking = asyncio.Lock()

    async def expose(self, accept: str, prefix: str) -> tuple[bytes, str]:
        """The body of /metrics and its content type, for the Accept header of the scraper."""
        async with self._taking:
            now = time.monotonic()
            life = self._settings.metrics_seconds
            self._taken = {known: taken for known, taken in self._taken.items() if now - taken[0] < life}
            if prefix not in self._taken:
                self._taken[prefix] = now, await self._take(prefix)
            exposition = self._taken[prefix][1]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(exposition))
        encoder, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encoder, registry), content_type

    async def _take(self, prefix: str) -> Exposition:
        exposition = Exposition(self._settings.max_series)

        async def read(connection: AsyncConnection) -> None:
            await _add_service(connection, exposition, self._store, self._counters)
            await _add_runs(connection, exposition, self._settings, prefix)

        await self._store.look(read)
        self._counters.series_dropped = exposition.dropped
        exposition.values[BY_KEY["service.series_dropped"].name] = {(): float(exposition.dropped)}
        return exposition


async def _add_service(connection: AsyncConnection, exposition: Exposition, store: Store, counters: Counters) -> None:
    def add(key: str, labels: Labels, value: float | None) -> None:
        exposition.add(BY_KEY[key].name, labels, value)

    for result, count in sorted(counters.batches.items()):
        add("service.batches", (result,), count)
    for (sender, result), count in sorted(counters.webhooks.items()):
        add("service.webhooks", (sender, result), count)
    add("service.commit", (), counters.commit_seconds)
    add("service.store", (), await store.size_bytes(connection))
    add("service.unreadable_rows", (), float(len(unreadable)))
    watchdog = select(service_state.c.value).where(service_state.c.key == "watchdog")
    add("service.watchdog", (), (await connection.execute(watchdog)).scalar())


async def _add_runs(connection: AsyncConnection, exposition: Exposition, settings: Settings, prefix: str) -> None:
    since = time.time() - max(settings.finished_run_seconds, settings.silent_run_seconds)
    query = select(runs).where(runs.c.last_seen >= since).order_by(desc(runs.c.last_seen), runs.c.id)
    rows = [row for row in await connection.execute(query) if row.name.startswith(prefix)]
    found: dict[int, list[Row[Any]]] = {row.id: [] for row in rows}
    for boot in await connection.execute(select(boots).where(boots.c.run_id.in_(found))):
        found[boot.run_id].append(boot)
    pending = await commands.pending_by_run(connection)
    raised = await active_warnings(connection, list(found))
    shown: list[Row[Any]] = []
    for row in rows:
        finished = status_of(found[row.id]) != "active"
        life = settings.finished_run_seconds if finished else settings.silent_run_seconds
        if time.time() - row.last_seen <= life:
            shown.append(row)
    newest = await newest_readings(connection, [row.id for row in shown])
    for row in shown:
        axis, reading = newest.get(row.id, (None, None))
        _add_run(exposition, row, found[row.id], reading, raised.get(row.id, []), pending.get(row.id, 0))
        if axis is not None and reading is not None:
            _add_heads(exposition, row.name, axis, reading, settings.worst_heads)
    await _add_counts(connection, exposition, {row.id: row.name for row in shown})


def _add_run(
    exposition: Exposition,
    row: Row[Any],
    known: list[Row[Any]],
    reading: Readings | None,
    raised: list[ActiveWarning],
    pending: int,
) -> None:
    def add(key: str, value: float | None, *labels: str) -> None:
        exposition.add(BY_KEY[key].name, (row.name, *labels), value)

    add("run.active", float(status_of(known) == "active"))
    add("service.commands_pending", float(pending))
    by_rank: Counter[int] = Counter()
    for boot in known:
        by_rank[boot.rank] += boot.nonfinite_steps
    add("run.nonfinite_steps", float(max(by_rank.values(), default=0)))
    dropped, faults = health_totals(known)
    for reason, count in {"queue_full": 0, **dropped}.items():  # a zero, so that a panel of a good run is not empty
        add("agent.dropped", float(count), reason)
    for component, count in {"sender": 0, **faults}.items():
        add("agent.faults", float(count), component)
    if reading is not None:
        add("run.step", float(reading.steps[-1]))
        add("run.last_sample", max(boot.last_seen for boot in newest_boots(known)))
        for key, value in reading.latest().items():
            add(key, value)
    for warning in raised:
        layer, head = _text(warning.layer), _text(warning.head)
        add("warning.active", 1.0, layer, head, warning.cause, warning.signal, warning.severity)
        add("warning.forecast", warning.forecast_steps, layer, head)


async def _add_counts(connection: AsyncConnection, exposition: Exposition, names: dict[int, str]) -> None:
    """Warnings by cause and switches by outcome of these runs, {run id: name}."""
    causes = select(warnings.c.run_id, warnings.c.cause, func.count()).where(warnings.c.run_id.in_(names))
    for run_id, cause, count in await connection.execute(causes.group_by(warnings.c.run_id, warnings.c.cause)):
        exposition.add(BY_KEY["warning.raised"].name, (names[run_id], cause), float(count))
    key = events.c.run_id, events.c.mode, events.c.outcome
    outcomes = select(*key, func.count()).where(events.c.run_id.in_(names), events.c.kind == "switched")
    for run_id, mode, outcome, count in await connection.execute(outcomes.group_by(*key)):
        exposition.add(BY_KEY["switch.outcomes"].name, (names[run_id], mode or "", outcome), float(count))


def _add_heads(exposition: Exposition, run: str, axis: Axis, reading: Readings, worst_heads: int) -> None:
    values = {metric: reading.head_values(metric)[-1] for metric in HEAD_METRICS}
    layers = np.array([layer for layer, _ in axis.heads])
    for metric, of_heads in values.items():
        for layer in axis.layers:
            own = of_heads[layers == layer]
            own = own[~np.isnan(own)]
            if own.size:
                worst = own[np.argmax(metric.badness(own))]
                exposition.add(metric.layer_name, (run, str(layer)), float(worst))
    for i in worst_first(values[BY_KEY["head.risk"]], values[BY_KEY["head.row_max_abs"]])[:worst_heads]:
        layer, head = axis.heads[i]
        for metric, of_heads in values.items():
            if not math.isnan(of_heads[i]):
                exposition.add(metric.name, (run, str(layer), str(head)), float(of_heads[i]))


def worst_first(risk: Any, size: Any) -> list[int]:
    """Heads by risk, then by their largest |row maximum|, then by number; those with neither are left out."""
    known = [i for i in range(len(risk)) if not (math.isnan(risk[i]) and math.isnan(size[i]))]
    return sorted(known, key=lambda i: (-np.nan_to_num(risk[i], nan=-1.0), -np.nan_to_num(size[i], nan=-1.0), i))


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
