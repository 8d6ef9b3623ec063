"""Roll-ups: every metric over buckets of 128 and of 1024 steps, so that a run of months is drawn in a moment.

They are built span by span of 1024 steps, and lie by layer: one head's curve does not read the heads of other layers.
A roll-up is nothing but a memory of its samples. Ingest counts the changes of each span; a span that the run has passed
is built in the background, and what has changed since is read from the samples themselves.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, bindparam, delete, insert, select, text, update

from foreshock.contract.metrics.catalog import BY_KEY, HEAD_METRICS
from foreshock.contract.slots import Floats
from foreshock.server.merging import LIVE_SAMPLES, SERIES_KEYS, Axis, Spans, axis_of, merge, stream_chunks
from foreshock.server.store.database import ClosingError, Store, lock_runs, log_store_error, pause
from foreshock.server.store.schema import rollup_spans, rollups, samples

COARSE: Final = 1024
FINE: Final = 128
_KEYS: Final = (*(metric.key for metric in HEAD_METRICS), *SERIES_KEYS)
_PAUSE_SECONDS: Final = 2.0
_CHANGED: Final = text(
    "INSERT INTO rollup_spans (run_id, span, changed, built) VALUES (:run_id, :span, 1, 0) "
    "ON CONFLICT (run_id, span) DO UPDATE SET changed = rollup_spans.changed + 1"
)
RUN_LEVEL: Final = -1
"""In the place of a layer, for a metric of the run."""

Levels = dict[tuple[str, int], Spans]


class Rolled(NamedTuple):
    """Some buckets of one layer's metric, ascending."""

    steps: npt.NDArray[np.int64]
    """[buckets]: the last step sampled in each."""
    values: Floats
    """[buckets, 3, heads]: low, high, last."""
    bad: npt.NDArray[np.bool_]
    """[buckets]: a run-level value was NaN."""


def buckets_of(width: int, heads: int) -> np.dtype[np.void]:
    """How the buckets of one span lie in a row: steps count from the span's first, -1 where nothing was sampled."""
    return np.dtype(
        [
            ("step", "<i2", (COARSE // width,)),
            ("bad", "?", (COARSE // width,)),
            ("values", "<f4", (COARSE // width, 3, heads)),
        ]
    )


class Roller:
    """Builds the roll-ups of spans that their runs have passed, once they rest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[tuple[int, int], int] = {}
        """Changes of the spans that were due at the last look."""

    async def run(self, closing: asyncio.Event) -> None:
        """Build until `closing` is set."""
        while not closing.is_set():
            await pause(closing, _PAUSE_SECONDS)
            try:
                await self.build_due(closing)
            except ClosingError:
                return
            except Exception as error:
                log_store_error("roll-ups could not be built; it is tried again", error)

    async def build_due(self, closing: asyncio.Event) -> None:
        """Build every span that has not changed since the last look: ranks that lag behind may still send of it."""
        due = await self._store.read(_due)
        rested = [key for key, changed in due.items() if self._seen.get(key) == changed]
        self._seen = due
        for run_id, span in rested:
            if closing.is_set():
                return
            await build(self._store, run_id, span)


def _due(connection: Connection) -> dict[tuple[int, int], int]:
    own, later = rollup_spans.c, rollup_spans.alias("later").c
    passed = select(later.span).where(later.run_id == own.run_id, later.span > own.span).exists()
    query = select(own.run_id, own.span, own.changed).where(own.changed != own.built, passed)
    return {(row.run_id, row.span): row.changed for row in connection.execute(query)}


async def build(store: Store, run_id: int, span: int) -> bool:
    """Build the roll-ups of one coarse span. False when it changed meanwhile."""
    steps = samples.c.step.between(span * COARSE, (span + 1) * COARSE - 1)
    same = rollup_spans.c.run_id == run_id, rollup_spans.c.span == span

    def roll(connection: Connection) -> tuple[int | None, Axis, list[dict[str, Any]]]:
        before = connection.execute(select(rollup_spans.c.changed).where(*same)).scalar()
        axis = axis_of(connection, run_id)
        levels = _empty_levels(axis, span)
        with stream_chunks(connection, LIVE_SAMPLES.where(samples.c.run_id == run_id, steps)) as chunks:
            for chunk in chunks:
                _roll(axis, chunk, levels)
        return before, axis, _as_rows(axis, levels, run_id, span)

    before, axis, built = await store.read(roll)

    def keep(connection: Connection) -> bool:
        lock_runs(connection, [run_id])
        unchanged = update(rollup_spans).where(*same, rollup_spans.c.changed == before).values(built=before)
        if not connection.execute(unchanged).rowcount:
            return False
        _delete(connection, axis, run_id, span)
        if built:
            connection.execute(insert(rollups), built)
        return True

    return await store.write(keep)


def _delete(connection: Connection, axis: Axis, run_id: int, span: int) -> None:
    """Take away what an earlier build of the span left, by key: the key ends with the span."""
    columns = (rollups.c.run_id, rollups.c.width, rollups.c.metric, rollups.c.layer, rollups.c.span)
    layers = [*axis.layers, RUN_LEVEL]
    keys = [(run_id, width, key, layer, span) for width in (FINE, COARSE) for key in _KEYS for layer in layers]
    rows = [{f"own_{column.key}": value for column, value in zip(columns, key, strict=True)} for key in keys]
    connection.execute(delete(rollups).where(*(c == bindparam(f"own_{c.key}") for c in columns)), rows)


def changed_spans(connection: Connection, spans: Iterable[tuple[int, int]]) -> None:
    """The roll-ups of these coarse spans, (run id, span) each, no longer hold."""
    connection.execute(_CHANGED, [{"run_id": run_id, "span": span} for run_id, span in sorted(spans)])


def changed_runs(connection: Connection, run_ids: Collection[int]) -> None:
    """No roll-up of these runs holds any longer, nor one that is being built."""
    if run_ids:
        own = update(rollup_spans).where(rollup_spans.c.run_id.in_(run_ids))
        connection.execute(own.values(changed=rollup_spans.c.changed + 1))


def _empty_levels(axis: Axis, span: int) -> Levels:
    first = span * COARSE
    return {
        (key, width): Spans.over(first, first + COARSE - 1, width, len(axis.heads) if BY_KEY[key].head else 1)
        for key in _KEYS
        for width in (FINE, COARSE)
    }


def _roll(axis: Axis, chunk: list[Row[Any]], levels: Levels) -> None:
    readings = merge(axis, chunk)
    for key in _KEYS:
        metric = BY_KEY[key]
        bad = None
        if metric.head is not None:
            values = readings.head_values(metric)
        else:
            run_values, given = readings.run_values(key)
            values, bad = run_values[:, None], given & np.isnan(run_values)
        for width in (FINE, COARSE):
            levels[key, width].add(readings.steps, values, values, values, bad)


def _as_rows(axis: Axis, levels: Levels, run_id: int, span: int) -> list[dict[str, Any]]:
    rows = []
    for (key, width), found in levels.items():
        if width == FINE and (found.steps >= 0).sum() <= 1:
            continue  # the coarse bucket says the same
        for layer, own in axis.columns.items() if BY_KEY[key].head else [(RUN_LEVEL, slice(None))]:
            parts = found.low[:, own], found.high[:, own], found.last[:, own]
            if np.isnan(parts[2]).all() and not found.bad.any():
                continue
            row = np.zeros((), buckets_of(width, parts[0].shape[1]))
            row["step"] = np.where(found.steps < 0, -1, found.steps - span * COARSE)
            row["bad"] = found.bad
            with np.errstate(over="ignore"):
                row["values"] = np.stack(parts, axis=1)
            same = {"run_id": run_id, "width": width, "metric": key, "layer": layer, "span": span}
            rows.append({**same, "data": row.tobytes()})
    return rows


def whole_spans(first: int, last: int) -> range:
    """The spans that lie within steps [first, last]."""
    return range(-(-first // COARSE), (last + 1) // COARSE)


def built_spans(connection: Connection, run_id: int, first: int, last: int) -> set[int]:
    """The spans within steps [first, last] whose roll-ups hold."""
    within = whole_spans(first, last)
    query = select(rollup_spans.c.span).where(
        rollup_spans.c.run_id == run_id,
        rollup_spans.c.span.between(within.start, within.stop - 1),
        rollup_spans.c.changed == rollup_spans.c.built,
    )
    return set(connection.execute(query).scalars())


def read(
    connection: Connection,
    axis: Axis,
    run_id: int,
    width: int,
    metrics: Collection[str],
    layers: Collection[int],
    spans: Collection[int],
) -> dict[tuple[str, int], Rolled]:
    """Buckets of `width` (or COARSE, where a span has but one), by metric and layer, of spans that are built."""
    if not spans or not metrics:
        return {}
    query = select(rollups.c.metric, rollups.c.layer, rollups.c.span, rollups.c.width, rollups.c.data).where(
        rollups.c.run_id == run_id,
        rollups.c.width.in_({width, COARSE}),
        rollups.c.metric.in_(metrics),
        rollups.c.layer.in_(layers),
        rollups.c.span.between(min(spans), max(spans)),
    )
    found: dict[tuple[str, int], dict[int, tuple[int, bytes]]] = defaultdict(dict)
    for metric, layer, span, own, data in connection.execute(query).all():
        if span not in spans:
            continue  # a row that was forgotten
        rows = found[metric, layer]
        if span not in rows or own < rows[span][0]:
            rows[span] = own, data
    sizes = {layer: own.stop - own.start for layer, own in axis.columns.items()} | {RUN_LEVEL: 1}
    return {(metric, layer): _rolled(rows, sizes[layer]) for (metric, layer), rows in found.items()}


def _rolled(rows: dict[int, tuple[int, bytes]], heads: int) -> Rolled:
    steps, values, bad = [], [], []
    for width, own in groupby(sorted(rows), key=lambda span: rows[span][0]):
        spans = list(own)
        part = np.frombuffer(b"".join(rows[span][1] for span in spans), buckets_of(width, heads))
        held = part["step"] >= 0
        steps.append((part["step"] + np.array(spans, dtype=np.int64)[:, None] * COARSE)[held])
        values.append(part["values"][held])
        bad.append(part["bad"][held])
    return Rolled(np.concatenate(steps), np.concatenate(values), np.concatenate(bad))
