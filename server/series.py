"""Metrics against the step, and the heads of a run side by side."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, Metric
from foreshock.server.merging import LIVE_SAMPLES, SERIES_KEYS, Axis, arrays_of, axis_of, badness, merge, stream_chunks
from foreshock.server.models import Line, Matrix, Series
from foreshock.server.problems import ProblemError
from foreshock.server.rollups import COARSE, FINE, Roller, unpack
from foreshock.server.schema import rollup_spans, rollups, samples
from foreshock.server.spans import Spans

_SAMPLES_READ: Final = 2000
"""Up to so many samples a series is read from them alone; beyond, from the roll-ups where they are built."""

Columns = Sequence[npt.NDArray[np.intp]]


def number(value: float) -> float | None:
    """A value for an answer: NaN, where nothing was counted, becomes null."""
    return None if math.isnan(value) else float(value)


def metric_of(key: str, *, per_head: bool = False) -> Metric:
    """A metric that has such a view. Raises ProblemError for others."""
    metric = BY_KEY.get(key)
    if metric is None or (metric.head is None and (per_head or key not in SERIES_KEYS)):
        allowed = [m.key for m in BY_KEY.values() if m.head is not None]
        allowed += [] if per_head else list(SERIES_KEYS)
        raise ProblemError(422, f"metric {key[:64]!r} has no such view; allowed are {', '.join(allowed)}.")
    return metric


async def series(
    connection: AsyncConnection,
    roller: Roller,
    run_id: int,
    run: str,
    metric: Metric,
    layer: int | None,
    head: int | None,
    span: tuple[int | None, int | None],
    max_points: int,
) -> Series:
    """One metric against the step; see models.Series."""
    axis = await axis_of(connection, run_id)
    if head is not None and layer is None:
        raise ProblemError(422, "head needs layer: heads are numbered within their layer.")
    if metric.head is not None:
        _check_on_axis(axis, run, layer, head)
    answer = Series(run=run, metric=metric.key, unit=metric.unit, lines=[])
    lowest, highest = await _edges(connection, run_id)
    if lowest is None or highest is None:
        return answer
    first, last = max(lowest, span[0] or 0), min(highest, highest if span[1] is None else span[1])
    if first > last:
        return answer
    columns = _columns(axis, metric, layer, head)
    picked = np.concatenate([np.empty(0, dtype=np.intp), *columns])
    spans = Spans.for_points(first, last, max_points, len(picked))
    within = (samples.c.run_id == run_id, samples.c.step.between(first, last))
    count = (await connection.execute(select(func.count()).select_from(samples).where(*within))).scalar_one()
    rolled: set[int] = set()
    if count > _SAMPLES_READ:
        rolled = await _add_rollups(connection, run_id, metric, picked, spans, first, last)
    await _add_samples(
        connection, axis, metric, picked, spans, run_id, first, last, rolled, roller if count > _SAMPLES_READ else None
    )
    answer.lines = _lines(axis, metric, head, columns, spans)
    return answer


async def _add_rollups(
    connection: AsyncConnection,
    run_id: int,
    metric: Metric,
    picked: npt.NDArray[np.intp],
    spans: Spans,
    first: int,
    last: int,
) -> set[int]:
    """Take in what is rolled up; which coarse spans that was. Spans that reach beyond [first, last] are left out."""
    built = select(rollup_spans.c.span).where(
        rollup_spans.c.run_id == run_id,
        rollup_spans.c.span.between(-(-first // COARSE), (last + 1) // COARSE - 1),
    )
    rolled = set((await connection.execute(built)).scalars())
    if not rolled:
        return rolled
    query = (
        select(rollups.c.bucket, rollups.c.last_step, rollups.c.data)
        .where(
            rollups.c.run_id == run_id,
            rollups.c.width == (COARSE if spans.width >= 2 * FINE else FINE),
            rollups.c.metric == metric.key,
            rollups.c.bucket.between(min(rolled) * COARSE, (max(rolled) + 1) * COARSE - 1),
        )
        .order_by(rollups.c.bucket)
    )
    found = [row for row in await connection.execute(query) if row.bucket // COARSE in rolled]
    if found:
        parts = [unpack(row.data) for row in found]
        values = np.stack([part[:, picked] for part, _ in parts], axis=1)
        steps = np.array([row.last_step for row in found], dtype=np.int64)
        spans.add(steps, values[0], values[1], values[2], np.array([bad for _, bad in parts]))
    return rolled


async def _add_samples(
    connection: AsyncConnection,
    axis: Axis,
    metric: Metric,
    picked: npt.NDArray[np.intp],
    spans: Spans,
    run_id: int,
    first: int,
    last: int,
    rolled: set[int],
    roller: Roller | None,
) -> None:
    """Take in the samples of the steps that are not rolled up."""
    names = arrays_of(metric)
    wanted = LIVE_SAMPLES.where(samples.c.run_id == run_id)
    if not names:
        wanted = wanted.with_only_columns(*(c for c in wanted.selected_columns if c.key != "arrays"))
    for begin, end in _gaps(first, last, rolled):
        async for chunk in stream_chunks(connection, wanted.where(samples.c.step.between(begin, end))):
            readings = merge(axis, chunk, names)
            if metric.head is not None:
                values, bad = readings.head_values(metric)[:, picked], None
            else:
                run_values, given = readings.run_values(metric.key)
                values, bad = run_values[:, None], given & np.isnan(run_values)
            spans.add(readings.steps, values, values, values, bad)
            if roller is not None:
                for span in np.unique(readings.steps // COARSE):
                    roller.touch(run_id, int(span) * COARSE)


def _gaps(first: int, last: int, rolled: set[int]) -> list[tuple[int, int]]:
    """The parts of [first, last] outside the coarse spans `rolled`."""
    gaps = []
    begin = first
    for span in sorted(rolled):
        if begin < span * COARSE:
            gaps.append((begin, span * COARSE - 1))
        begin = (span + 1) * COARSE
    return [*gaps, (begin, last)] if begin <= last else gaps


def _check_on_axis(axis: Axis, run: str, layer: int | None, head: int | None) -> None:
    if layer is not None and layer not in axis.layers:
        raise ProblemError(404, f"Run {run} has no layer {layer}.")
    if layer is not None and head is not None and (layer, head) not in axis.index():
        raise ProblemError(404, f"Run {run} has no layer {layer} head {head}.")


def _columns(axis: Axis, metric: Metric, layer: int | None, head: int | None) -> Columns:
    """For each line, where its heads stand on the axis."""
    if metric.head is None:
        return [np.zeros(1, dtype=np.intp)]
    layers = axis.layers if layer is None else [layer]
    return [
        np.array([i for i, (own, h) in enumerate(axis.heads) if own == one and head in (None, h)], dtype=np.intp)
        for one in layers
    ]


def _lines(axis: Axis, metric: Metric, head: int | None, columns: Columns, spans: Spans) -> list[Line]:
    filled = np.flatnonzero(spans.steps >= 0)
    steps = spans.steps[filled].tolist()
    lines = []
    at = 0
    for column in columns:
        here = slice(at, at + len(column))
        at += len(column)
        low, high, last = (values[filled, here] for values in (spans.low, spans.high, spans.last))
        worst_head = None
        if metric.head is not None and head is None:
            size = np.fmax(badness(metric, low), badness(metric, high))
            known = ~np.isnan(size).all(axis=1)
            worst = np.argmax(np.where(np.isnan(size), -np.inf, size), axis=1)
            low, high, last = (np.take_along_axis(values, worst[:, None], axis=1) for values in (low, high, last))
            numbers = [axis.heads[i][1] for i in column]
            worst_head = [numbers[w] if k else None for w, k in zip(worst, known, strict=True)]
        bad = spans.bad[filled].tolist()
        lines.append(
            Line(
                layer=None if metric.head is None else axis.heads[column[0]][0],
                head=head if metric.head is not None else None,
                steps=steps,
                low=[number(value) for value in low[:, 0]],
                high=[number(value) for value in high[:, 0]],
                last=[math.nan if b else number(value) for value, b in zip(last[:, 0], bad, strict=True)],
                worst_head=worst_head,
            )
        )
    return lines


async def matrix(
    connection: AsyncConnection, run_id: int, run: str, metric: Metric, step: int | None, max_steps: int
) -> Matrix:
    """One per-head metric of every head at the newest step that is not after `step`."""
    axis = await axis_of(connection, run_id)
    query = LIVE_SAMPLES.with_only_columns(samples.c.step).where(samples.c.run_id == run_id).order_by(None)
    if step is not None:
        query = query.where(samples.c.step <= step)
    found: int | None = (await connection.execute(query.order_by(samples.c.step.desc()).limit(1))).scalar()
    layers, heads = axis.layers, sorted({head for _, head in axis.heads})
    values = np.full((len(layers), len(heads)), np.nan)
    if found is not None:
        rows = (await connection.execute(LIVE_SAMPLES.where(samples.c.run_id == run_id, samples.c.step == found))).all()
        row_of, column_of = {n: i for i, n in enumerate(layers)}, {n: i for i, n in enumerate(heads)}
        of_heads = merge(axis, rows, arrays_of(metric)).head_values(metric)[0]
        for (layer, head), value in zip(axis.heads, of_heads, strict=True):
            values[row_of[layer], column_of[head]] = value
    return Matrix(
        run=run,
        metric=metric.key,
        unit=metric.unit,
        step=found,
        layers=layers,
        heads=heads,
        values=[[number(value) for value in row] for row in values],
        steps=await _steps(connection, run_id, max_steps),
    )


async def _steps(connection: AsyncConnection, run_id: int, count: int) -> list[int]:
    """Steps that were sampled, at most `count`: the first, the last, and the ones next to evenly spaced steps."""
    if count == 0:
        return []
    own = samples.c.run_id == run_id
    known = select(samples.c.step).where(own).distinct().order_by(samples.c.step)
    some = (await connection.execute(known.limit(count + 1))).scalars().all()
    if len(some) <= count:
        return list(some)
    first, last = await _edges(connection, run_id)
    if first is None or last is None:
        return []
    width = math.ceil((last - first) / max(1, count - 2))
    # A loose scan of the index: each step is found from the one before, however many lie between.
    found = select(func.min(samples.c.step).label("step")).where(own).cte("found", recursive=True)
    after = select(func.min(samples.c.step)).where(own, samples.c.step >= found.c.step + width).scalar_subquery()
    found = found.union_all(select(after).where(found.c.step.is_not(None)))
    thinned = (await connection.execute(select(found.c.step).where(found.c.step.is_not(None)))).scalars().all()
    return sorted({*thinned, last})[-count:]


async def _edges(connection: AsyncConnection, run_id: int) -> tuple[int | None, int | None]:
    """The first and the last step of a run. Each by itself is one look into the index; together they would scan it."""
    own = samples.c.run_id == run_id
    lowest = select(func.min(samples.c.step)).where(own).scalar_subquery()
    highest = select(func.max(samples.c.step)).where(own).scalar_subquery()
    first, last = (await connection.execute(select(lowest, highest))).one()
    return first, last
