"""Roll-ups: every metric over buckets of 128 and of 1024 steps, so that a run of months is drawn in a moment.

They are built span by span of 1024 steps, and lie by layer: one head's curve does not read the heads of other layers.
A roll-up is nothing but a memory of its samples: it is built in the background when the run has moved on, thrown away
when a sample of its steps comes late, and whatever is not built is read from the samples themselves.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from foreshock.contract.metrics.catalog import BY_KEY, HEAD_METRICS
from foreshock.contract.slots import Floats
from foreshock.server.merging import LIVE_SAMPLES, SERIES_KEYS, Axis, Spans, axis_of, merge, stream_chunks
from foreshock.server.store.database import ClosingError, Many, Store, lock_runs, log_store_error, pause
from foreshock.server.store.schema import rollup_spans, rollups, runs, samples

COARSE: Final = 1024
FINE: Final = 128
_KEYS: Final = (*(metric.key for metric in HEAD_METRICS), *SERIES_KEYS)
_COLD_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 1.0
_WAITING: Final = 100_000


_FORGET: Final = Many(
    delete(rollup_spans).where(
        rollup_spans.c.run_id == bindparam("own_run"), rollup_spans.c.span == bindparam("own_span")
    ),
    ["own_run", "own_span"],
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
    """Builds roll-ups of what was touched, once it is cold: the run is past it, or has been silent for a minute."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._touched: dict[tuple[int, int], float] = {}
        self._newest: dict[int, int] = {}
        self._closing = asyncio.Event()

    def touch(self, run_id: int, step: int) -> None:
        """A sample of this step was stored, or its roll-up was looked for and is not there."""
        if len(self._touched) < _WAITING:  # what is forgotten here is found missing at its first use
            self._touched[run_id, step // COARSE] = time.monotonic()
        self._newest[run_id] = max(step, self._newest.get(run_id, 0))

    async def run(self, closing: asyncio.Event) -> None:
        """Build until `closing` is set."""
        self._closing = closing
        while not closing.is_set():
            await pause(closing, _PAUSE_SECONDS)
            try:
                await self.build_cold()
            except ClosingError:
                return
            except Exception as error:
                log_store_error("roll-ups could not be built; it is tried again", error)

    async def build_cold(self, cold_seconds: float = _COLD_SECONDS) -> None:
        """Build every roll-up that is cold."""
        now = time.monotonic()
        for (run_id, span), touched in list(self._touched.items()):
            if self._closing.is_set():
                return
            passed = self._newest.get(run_id, 0) >= (span + 1) * COARSE + COARSE // 4
            if passed or now - touched >= cold_seconds:
                del self._touched[run_id, span]
                if not await build(self._store, run_id, span):
                    self._touched.setdefault((run_id, span), now)
        waiting = {run_id for run_id, _ in list(self._touched)}
        self._newest = {run_id: step for run_id, step in list(self._newest.items()) if run_id in waiting}


async def build(store: Store, run_id: int, span: int) -> bool:
    """Build the roll-ups of one coarse span. False when a sample came in meanwhile."""
    steps = samples.c.step.between(span * COARSE, (span + 1) * COARSE - 1)

    def roll(connection: Connection) -> tuple[Any, Axis, list[dict[str, Any]]]:
        before = _fingerprint(connection, run_id, span)
        axis = axis_of(connection, run_id)
        levels = _empty_levels(axis, span)
        with stream_chunks(connection, LIVE_SAMPLES.where(samples.c.run_id == run_id, steps)) as chunks:
            for chunk in chunks:
                _roll(axis, chunk, levels)
        return before, axis, _as_rows(axis, levels, run_id, span)

    before, axis, built = await store.read(roll)

    def keep(connection: Connection) -> bool:
        lock_runs(connection, [run_id])
        now = _fingerprint(connection, run_id, span)
        if now != before or now is None:
            return now is None  # the run is too old, and was deleted meanwhile
        forget(connection, [(run_id, span)])
        _delete(connection, axis, run_id, span)
        if built:
            connection.execute(insert(rollups), built)
        connection.execute(insert(rollup_spans).values(run_id=run_id, span=span))
        return True

    return await store.write(keep)


def _delete(connection: Connection, axis: Axis, run_id: int, span: int) -> None:
    """Take away what an earlier build of the span left, by key: the key ends with the span."""
    columns = (rollups.c.run_id, rollups.c.width, rollups.c.metric, rollups.c.layer, rollups.c.span)
    layers = [*axis.layers, RUN_LEVEL]
    keys = [(run_id, width, key, layer, span) for width in (FINE, COARSE) for key in _KEYS for layer in layers]
    rows = [{f"own_{column.key}": value for column, value in zip(columns, key, strict=True)} for key in keys]
    connection.execute(delete(rollups).where(*(c == bindparam(f"own_{c.key}") for c in columns)), rows)


def forget(connection: Connection, spans: Iterable[tuple[int, int]]) -> None:
    """The roll-ups of these coarse spans, (run id, span) each, no longer hold."""
    rows = [{"own_run": run_id, "own_span": span} for run_id, span in sorted(spans)]
    _FORGET.execute(connection, rows)


def forget_runs(connection: Connection, run_ids: Collection[int]) -> None:
    """No roll-up of these runs holds any longer, nor one that is being built."""
    if run_ids:
        connection.execute(delete(rollup_spans).where(rollup_spans.c.run_id.in_(run_ids)))
        connection.execute(update(runs).where(runs.c.id.in_(run_ids)).values(reshaped=runs.c.reshaped + 1))


def _fingerprint(connection: Connection, run_id: int, span: int) -> tuple[int, int, int | None] | None:
    """Changes whenever the roll-up of the span would; None where there is no run."""
    steps = samples.c.step.between(span * COARSE, (span + 1) * COARSE - 1)
    counted = select(func.count(), func.max(samples.c.id)).where(samples.c.run_id == run_id, steps)
    reshaped = connection.execute(select(runs.c.reshaped).where(runs.c.id == run_id)).scalar()
    return None if reshaped is None else (reshaped, *connection.execute(counted).one())


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
        rollup_spans.c.run_id == run_id, rollup_spans.c.span.between(within.start, within.stop - 1)
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
