"""GET /metrics, derived from the catalogue: the service itself, runs, one value per layer, and the worst heads.

Labels come from closed sets and from names that the wire format has checked. The number of series is bounded: state,
step and warnings of every run come first, one round after the other, tenants in turn; then what else is known of whole
runs, layers, heads. What does not fit into the budget is left out and counted. What was made of a run is kept until it
changes. What the newest sample lacks is shown as it was measured last.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Row, select

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.server.access.auth import Keyring
from foreshock.server.commands import lifecycle as commands
from foreshock.server.counters import Counters
from foreshock.server.http.head_tables import HEADS_AT_ONCE, Reading, head_tables
from foreshock.server.http.lines import Line, encoder, line
from foreshock.server.http.run_series import RunRows, RunSeries, read_rows, series_of
from foreshock.server.logs import lines
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store
from foreshock.server.store.executors import give_up_if_cancelled
from foreshock.server.store.reading import unreadable
from foreshock.server.store.schema import runs, service_state

log = structlog.get_logger()
_RUNS_AT_ONCE: Final = 64
"""Runs whose newest samples are held in memory together."""


@dataclass
class Exposition:
    """Lines by metric name, filled run by run until the budget is spent."""

    budget: int
    lines: defaultdict[str, list[str]] = field(default_factory=partial(defaultdict, list))
    dropped: int = 0
    used: int = 0

    def add(self, key: str, value: float | None, *labels: str) -> None:
        """Add one of the service's own, by the metric's key; None is left out."""
        if value is not None:
            self.extend([line(BY_KEY[key].name, labels, value)])

    def set(self, key: str, value: float) -> None:
        """Write a metric without labels (again), beside the budget."""
        name, text = line(BY_KEY[key].name, (), value)
        self.lines[name] = [text]

    def extend(self, lines: Sequence[Line]) -> None:
        """Add series in this order, none of which is there, as far as the budget reaches."""
        room = max(0, self.budget - self.used)
        if room < len(lines):
            self.dropped += len(lines) - room
            lines = lines[:room]
        self.used += len(lines)
        for name, text in lines:
            self.lines[name].append(text)


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
                self._taken[prefix] = now, await self._store.read(partial(self._take, prefix=prefix))
            exposition = self._taken[prefix][1]
        encode, content_type = encoder(accept)
        return await asyncio.to_thread(encode, exposition.lines), content_type

    def _take(self, connection: Connection, prefix: str) -> Exposition:
        exposition = Exposition(self._settings.max_series)
        rows, per_run = self._look(connection, exposition, prefix)
        self._read_anew(connection, [row for row in rows if self._made_of(row) is None])
        now = time.time()
        shown = [(row, series) for row in rows if (series := self._made_of(row)) and self._is_shown(row, series, now)]
        _fill(exposition, self._in_turns(shown), per_run)
        exposition.set("service.series_dropped", float(exposition.dropped))
        if not prefix:
            exposition.set("service.unreadable_rows", float(len(unreadable)))  # now that the runs have been read
            self._counters.series_dropped = exposition.dropped
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

    def _look(
        self, connection: Connection, exposition: Exposition, prefix: str
    ) -> tuple[list[Row[Any]], dict[str, dict[int, int]]]:
        """The runs that may be shown, and by metric what is counted of their commands.

        The service's own are added for who may see every run: they count what all tenants do.
        """
        if not prefix:
            _add_service(connection, exposition, self._store, self._counters)
        since = time.time() - max(self._settings.finished_run_seconds, self._settings.silent_run_seconds)
        rows = connection.execute(select(runs).where(runs.c.last_seen >= since)).all()
        self._made = {row.id: self._made[row.id] for row in rows if row.id in self._made}
        per_run = {
            "service.commands_pending": commands.pending_by_run(connection),
            "switch.not_arrested": commands.not_arrested_by_run(connection),
        }
        return [row for row in rows if row.name.startswith(prefix)], per_run

    def _made_of(self, row: Row[Any]) -> RunSeries | None:
        """The series of a run, unless it has changed since they were made."""
        changes, series = self._made.get(row.id, (None, None))
        return series if changes == row.changes else None

    def _read_anew(self, connection: Connection, rows: Sequence[Row[Any]]) -> None:
        for first in range(0, len(rows), _RUNS_AT_ONCE):
            give_up_if_cancelled(connection)
            some = rows[first : first + _RUNS_AT_ONCE]
            made = self._make_all(self.read_changed(connection, some))
            self._made |= {row.id: (row.changes, made[row.id]) for row in some}

    def _make_all(self, found: dict[int, RunRows]) -> dict[int, RunSeries]:
        made: dict[int, RunSeries] = {}
        waiting: dict[int, Reading] = {}
        for run_id, rows in found.items():
            try:
                made[run_id], reading = series_of(rows)
            except Exception:  # one run's fault stays that run's
                log.exception("a run cannot be shown in /metrics", run=rows.name)
                made[run_id] = RunSeries(finished=False)
                continue
            if reading is not None and rows.newest is not None and rows.newest[0].heads:
                waiting[run_id] = rows.name, rows.newest[0], reading
            if sum(len(axis.heads) for _, axis, _ in waiting.values()) >= HEADS_AT_ONCE:
                self._add_tables(made, waiting)
                waiting = {}
        self._add_tables(made, waiting)
        return made

    def _add_tables(self, made: dict[int, RunSeries], readings: dict[int, Reading]) -> None:
        if not readings:
            return
        for run_id, tables in zip(readings, head_tables([*readings.values()], self._settings.worst_heads), strict=True):
            made[run_id].layers, made[run_id].heads = tables

    def read_changed(self, connection: Connection, rows: Sequence[Row[Any]]) -> dict[int, RunRows]:
        """What the store knows of runs that changed."""
        return read_rows(connection, rows, self._settings.verify_steps)

    def _is_shown(self, row: Row[Any], series: RunSeries, now: float) -> bool:
        life = self._settings.finished_run_seconds if series.finished else self._settings.silent_run_seconds
        return bool(now - row.last_seen <= life)


def _fill(
    exposition: Exposition, shown: Sequence[tuple[Row[Any], RunSeries]], per_run: dict[str, dict[int, int]]
) -> None:
    """Spend the budget on runs, in this order."""
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
    add("service.unreadable_rows", float(len(unreadable)))  # its place in the budget; counted anew at the end
    watchdog = select(service_state.c.value).where(service_state.c.key == "watchdog")
    add("service.watchdog", connection.execute(watchdog).scalar())
