"""GET /metrics, derived from the catalogue: the service itself, runs, one value per layer, and the worst heads.

Labels come from closed sets and from names that the wire format has checked. The number of series is bounded: state,
step and warnings of every run come first, one round after the other, tenants in turn; then what else is known of whole
runs, layers, heads. What does not fit into the budget is left out and counted. What was made of a run is kept until it
changes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, METRICS
from foreshock.contract.metric import Metric
from foreshock.server.access.auth import Keyring
from foreshock.server.access.quotas import owners
from foreshock.server.commands import lifecycle as commands
from foreshock.server.counters import Counters
from foreshock.server.http.run_series import Entry, Labels, RunRows, RunSeries, read_rows, series_of
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store
from foreshock.server.store.reading import unreadable
from foreshock.server.store.schema import runs, service_state

log = structlog.get_logger()
_RUNS_AT_ONCE: Final = 64
"""Runs whose newest samples are held in memory together."""


@dataclass
class Exposition:
    """Values by metric name, filled run by run until the budget is spent."""

    budget: int
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    dropped: int = 0
    used: int = 0
    owners: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    """By run its token, and by token the series that its quota leaves."""

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """Add one series, or count it as dropped. None and series that are there already are left out."""
        if value is not None:
            self.extend([(name, labels, value)])

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add series in this order."""
        for name, labels, value in entries:
            of_name = self.values.setdefault(name, {})
            if labels in of_name:
                continue
            if self.used < self.budget and (not self.left or self._within_quota(labels)):
                self.used += 1
                of_name[labels] = value
            else:
                self.dropped += 1

    def _within_quota(self, labels: Labels) -> bool:
        """Take one of what is left to the token whose run the first label names."""
        owner = self.owners.get(labels[0]) if labels else None
        if owner not in self.left:
            return True
        self.left[owner] -= 1
        return self.left[owner] >= 0


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

    def __init__(self, store: Store, settings: Settings, counters: Counters, keyring: Keyring) -> None:
        self._store, self._settings, self._counters, self._keyring = store, settings, counters, keyring
        self._taken: dict[str, tuple[float, Exposition]] = {}
        self._made: dict[int, tuple[int, RunSeries]] = {}
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
        rows, per_run = await self._store.look(lambda connection: self._look(connection, exposition, prefix))
        await self._read_anew([row for row in rows if self._made_of(row) is None])
        now = time.time()
        shown = [(row, series) for row in rows if (series := self._made_of(row)) and self._is_shown(row, series, now)]
        shown = self._in_turns(shown)
        quotas = {token.name: token.quota.series for token in self._keyring.tokens}
        exposition.left = {name: series for name, series in quotas.items() if series is not None}
        if exposition.left:
            exposition.owners = await self._store.look(owners)
        rounds = zip_longest(*(series.urgent for _, series in shown), fillvalue=())
        exposition.extend(entry for one_round in rounds for told in one_round for entry in told)
        for key, counts in per_run.items():
            name = BY_KEY[key].name
            exposition.extend((name, (row.name,), float(counts.get(row.id, 0))) for row, _ in shown)
        exposition.extend(entry for _, series in shown for entry in series.whole)
        for table in (*(series.layers for _, series in shown), *(series.heads for _, series in shown)):
            if exposition.used >= exposition.budget:
                exposition.dropped += len(table or ())
            else:
                exposition.extend(table or ())
        # counted anew, now that the runs have been read
        exposition.values[BY_KEY["service.unreadable_rows"].name] = {(): float(len(unreadable))}
        self._counters.series_dropped = exposition.dropped
        exposition.values[BY_KEY["service.series_dropped"].name] = {(): float(exposition.dropped)}
        return exposition

    def _in_turns(self, shown: Sequence[tuple[Row[Any], RunSeries]]) -> list[tuple[Row[Any], RunSeries]]:
        """Living runs first, each tenant's in turn, the oldest first: newcomers displace nobody, and many runs of one
        tenant none of another's. Whose runs begin with the same prefix of a token are one tenant's.
        """
        prefixes = sorted({token.run_prefix for token in self._keyring.tokens}, key=len, reverse=True)
        turns: Counter[tuple[str, bool]] = Counter()
        placed: list[tuple[bool, int, int, Row[Any], RunSeries]] = []
        for row, series in sorted(shown, key=lambda run: (run[0].first_seen, run[0].id)):
            tenant = next((prefix for prefix in prefixes if row.name.startswith(prefix)), "")
            turns[tenant, series.finished] += 1
            placed.append((series.finished, turns[tenant, series.finished], len(placed), row, series))
        return [(row, series) for *_, row, series in sorted(placed, key=lambda place: place[:3])]

    async def _look(
        self, connection: AsyncConnection, exposition: Exposition, prefix: str
    ) -> tuple[list[Row[Any]], dict[str, dict[int, int]]]:
        """The runs that may be shown, and by metric what is counted of their commands; the service's own are added."""
        await _add_service(connection, exposition, self._store, self._counters)
        since = time.time() - max(self._settings.finished_run_seconds, self._settings.silent_run_seconds)
        rows = (await connection.execute(select(runs).where(runs.c.last_seen >= since))).all()
        self._made = {row.id: self._made[row.id] for row in rows if row.id in self._made}
        per_run = {
            "service.commands_pending": await commands.pending_by_run(connection),
            "switch.not_arrested": await commands.not_arrested_by_run(connection),
        }
        return [row for row in rows if row.name.startswith(prefix)], per_run

    def _made_of(self, row: Row[Any]) -> RunSeries | None:
        """The series of a run, unless it has changed since they were made."""
        changes, series = self._made.get(row.id, (None, None))
        return series if changes == row.changes else None

    async def _read_anew(self, rows: Sequence[Row[Any]]) -> None:
        for first in range(0, len(rows), _RUNS_AT_ONCE):
            some = rows[first : first + _RUNS_AT_ONCE]
            found = await self._store.look(partial(self.read_changed, rows=some))
            made = await asyncio.to_thread(self._make_all, found)
            self._made |= {row.id: (row.changes, made[row.id]) for row in some}

    def _make_all(self, found: dict[int, RunRows]) -> dict[int, RunSeries]:
        return {run_id: self._make(rows) for run_id, rows in found.items()}

    async def read_changed(self, connection: AsyncConnection, rows: Sequence[Row[Any]]) -> dict[int, RunRows]:
        """What the store knows of runs that changed."""
        return await read_rows(connection, rows, self._settings.verify_steps)

    def _make(self, rows: RunRows) -> RunSeries:
        try:
            return series_of(rows, self._settings.worst_heads)
        except Exception:  # one run's fault stays that run's
            log.exception("a run cannot be shown in /metrics", run=rows.name)
            return RunSeries(finished=False)

    def _is_shown(self, row: Row[Any], series: RunSeries, now: float) -> bool:
        life = self._settings.finished_run_seconds if series.finished else self._settings.silent_run_seconds
        return bool(now - row.last_seen <= life)


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
