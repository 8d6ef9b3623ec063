"""Roll-ups: every metric over spans of 128 and of 1024 steps, so that a run of months is drawn in a moment.

A roll-up is nothing but a memory of its samples: it is built in the background when the run has moved on, thrown away
when a sample of its steps comes late, and whatever is not built is read from the samples themselves.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from typing import Any, Final

import numpy as np
import structlog
from sqlalchemy import Row, bindparam, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, HEAD_METRICS, Floats
from foreshock.server.merging import LIVE_SAMPLES, SERIES_KEYS, Axis, axis_of, merge, stream_chunks
from foreshock.server.pause import pause
from foreshock.server.schema import boots, rollup_spans, rollups, runs, samples
from foreshock.server.spans import Spans
from foreshock.server.store import Store

log = structlog.get_logger()
COARSE: Final = 1024
FINE: Final = 128
_KEYS: Final = (*(metric.key for metric in HEAD_METRICS), *SERIES_KEYS)
_COLD_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 1.0
_WAITING: Final = 100_000


Levels = dict[tuple[str, int], Spans]


def pack(low: Floats, high: Floats, last: Floats, bad: bool) -> bytes:
    """float32 [3, columns] and whether a value was NaN."""
    with np.errstate(over="ignore"):
        return bytes([bad]) + np.stack([low, high, last]).astype("<f4").tobytes()


def unpack(data: bytes) -> tuple[Floats, bool]:
    """[3, columns]: low, high, last; and whether a value was NaN."""
    return np.frombuffer(data, "<f4", offset=1).reshape(3, -1).astype(np.float64), bool(data[0])


class Roller:
    """Builds roll-ups of what was touched, once it is cold: the run is past it, or has been silent for a minute."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._touched: dict[tuple[int, int], float] = {}
        self._newest: dict[int, int] = {}
        self._closing = asyncio.Event()

    def touch(self, run_id: int, step: int) -> None:
        """A sample of this step was stored, or its roll-up was missed."""
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
            except Exception:
                log.exception("roll-ups could not be built; it is tried again")

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
        self._newest = {r: s for r, s in self._newest.items() if any(r == run for run, _ in self._touched)}


async def build(store: Store, run_id: int, span: int) -> bool:
    """Build the roll-ups of one coarse span. False when a sample came in meanwhile."""
    steps = samples.c.step.between(span * COARSE, (span + 1) * COARSE - 1)
    async with store.read() as connection:
        before = await _fingerprint(connection, run_id, span)
        axis = await axis_of(connection, run_id)
        levels = _empty_levels(axis, span)
        async for chunk in stream_chunks(connection, LIVE_SAMPLES.where(samples.c.run_id == run_id, steps)):
            await asyncio.to_thread(_roll, axis, chunk, levels)
    built = _as_rows(levels, run_id)
    async with store.write() as connection:
        await connection.execute(select(runs.c.id).where(runs.c.id == run_id).with_for_update())
        if before != await _fingerprint(connection, run_id, span):
            return False
        await forget(connection, [(run_id, span)])
        old = rollups.c.bucket.between(span * COARSE, (span + 1) * COARSE - 1)
        await connection.execute(delete(rollups).where(rollups.c.run_id == run_id, old))
        if built:
            await connection.execute(insert(rollups), built)
        await connection.execute(insert(rollup_spans).values(run_id=run_id, span=span))
    return True


async def forget(connection: AsyncConnection, spans: Iterable[tuple[int, int]]) -> None:
    """The roll-ups of these coarse spans, (run id, span) each, no longer hold."""
    same = rollup_spans.c.run_id == bindparam("own_run"), rollup_spans.c.span == bindparam("own_span")
    rows = [{"own_run": run_id, "own_span": span} for run_id, span in sorted(spans)]
    await connection.execute(delete(rollup_spans).where(*same), rows)


async def forget_runs(connection: AsyncConnection, run_ids: Collection[int]) -> None:
    """No roll-up of these runs holds any longer."""
    if run_ids:
        await connection.execute(delete(rollup_spans).where(rollup_spans.c.run_id.in_(run_ids)))


async def _fingerprint(connection: AsyncConnection, run_id: int, span: int) -> Any:
    """Changes whenever the roll-up of the span would."""
    steps = samples.c.step.between(span * COARSE, (span + 1) * COARSE - 1)
    counted = select(func.count(), func.max(samples.c.id)).where(samples.c.run_id == run_id, steps)
    known = select(boots.c.id, boots.c.until_step, boots.c.topology).where(boots.c.run_id == run_id)
    found = (await connection.execute(known.order_by(boots.c.id))).all()
    return tuple((await connection.execute(counted)).one()), [tuple(row) for row in found]


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


def _as_rows(levels: Levels, run_id: int) -> list[dict[str, Any]]:
    rows = []
    for (key, width), spans in levels.items():
        for i in np.flatnonzero(spans.steps >= 0):
            if not np.isnan(spans.last[i]).all() or spans.bad[i]:
                bucket, last_step = spans.first + int(i) * width, int(spans.steps[i])
                data = pack(spans.low[i], spans.high[i], spans.last[i], bool(spans.bad[i]))
                row = {"run_id": run_id, "width": width, "metric": key, "bucket": bucket, "last_step": last_step}
                rows.append({**row, "data": data})
    return rows
