"""Metrics against the step, and the heads of a layer side by side."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY, Floats, Metric
from foreshock.server.merging import LIVE_SAMPLES, SERIES_KEYS, Axis, axis_of, merge
from foreshock.server.models import Line, Matrix, Series
from foreshock.server.problems import ProblemError
from foreshock.server.schema import samples


def number(value: float) -> float | None:
    """A value for an answer: NaN, where nothing was counted, becomes null."""
    return None if math.isnan(value) else float(value)


def metric_of(key: str, *, per_head: bool = False) -> Metric:
    """A metric that has a series. Raises ProblemError for others."""
    metric = BY_KEY.get(key)
    if metric is None or (metric.head is None and (per_head or key not in SERIES_KEYS)):
        allowed = [m.key for m in BY_KEY.values() if m.head is not None]
        allowed += [] if per_head else list(SERIES_KEYS)
        raise ProblemError(422, f"metric {key[:64]!r} has no such view; allowed are {', '.join(allowed)}.")
    return metric


class Buckets:
    """Minimum, maximum and last value of each of `count` curves over at most `points` spans of steps."""

    def __init__(self, count: int, first: int, last: int, points: int) -> None:
        self.width = max(1, math.ceil((last - first + 1) / points))
        self.first = first
        self.size = (last - first) // self.width + 1
        self.steps = np.full(self.size, -1, dtype=np.int64)
        self.low = np.full((self.size, count), np.nan)
        self.high = np.full((self.size, count), np.nan)
        self.last = np.full((self.size, count), np.nan)

    def add(self, step: int, low: Floats, high: Floats, last: Floats) -> None:
        """Take in values of steps up to `step`, [count] each, in ascending order of steps."""
        at = (step - self.first) // self.width
        self.steps[at] = step
        self.low[at] = np.fmin(self.low[at], low)
        self.high[at] = np.fmax(self.high[at], high)
        self.last[at] = np.where(np.isnan(last), self.last[at], last)


async def series(
    connection: AsyncConnection,
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
    query = select(func.min(samples.c.step), func.max(samples.c.step)).where(samples.c.run_id == run_id)
    first, last = (await connection.execute(query)).one()
    answer = Series(run=run, metric=metric.key, unit=metric.unit, lines=[])
    if first is None:
        return answer
    first, last = max(first, span[0] or 0), min(last, last if span[1] is None else span[1])
    if first > last:
        return answer
    columns = _columns(axis, metric, layer, head)
    buckets = Buckets(sum(map(len, columns)), first, last, max_points)
    wanted = LIVE_SAMPLES.where(samples.c.run_id == run_id, samples.c.step.between(first, last))
    picked = np.concatenate(columns) if columns else np.empty(0, dtype=np.intp)
    names = _arrays_of(metric)
    if metric.head is None and metric.key != "run.worst_risk":
        wanted = wanted.with_only_columns(*(c for c in wanted.selected_columns if c.name != "arrays"))
    async with connection.stream(wanted) as rows:
        async for step, group in _by_step(rows):
            if metric.head is None:
                reading = merge(axis, step, group, names) if names else merge_without_arrays(step, group)
                value = reading.latest()[metric.key]
                values = np.array([math.nan if value is None else value])
            else:
                values = merge(axis, step, group, names).head_values(metric)[picked]
            buckets.add(step, values, values, values)
    answer.lines = _lines(axis, metric, layer, head, columns, buckets)
    return answer


def merge_without_arrays(step: int, rows: Sequence[Row[Any]]) -> Any:
    """The run-level numbers of one step."""
    return merge(Axis((), {}), step, rows)


def _arrays_of(metric: Metric) -> frozenset[str]:
    if metric.key == "run.worst_risk":
        return frozenset({"risk"})
    if metric.head is None:
        return frozenset()
    return frozenset({metric.head.field or "states"})


async def _by_step(rows: Any) -> Any:
    group: list[Row[Any]] = []
    async for row in rows:
        if group and row.step != group[0].step:
            yield group[0].step, group
            group = []
        group.append(row)
    if group:
        yield group[0].step, group


def _check_on_axis(axis: Axis, run: str, layer: int | None, head: int | None) -> None:
    if layer is not None and layer not in axis.layers:
        raise ProblemError(404, f"Run {run} has no layer {layer}.")
    if head is not None and (layer, head) not in axis.index():
        raise ProblemError(404, f"Run {run} has no layer {layer} head {head}.")


def _columns(axis: Axis, metric: Metric, layer: int | None, head: int | None) -> list[Any]:
    """For each line, where its heads stand on the axis."""
    if metric.head is None:
        return [np.zeros(1, dtype=np.intp)]
    layers = axis.layers if layer is None else [layer]
    return [
        np.array([i for i, (own, h) in enumerate(axis.heads) if own == one and head in (None, h)], dtype=np.intp)
        for one in layers
    ]


def _lines(
    axis: Axis, metric: Metric, layer: int | None, head: int | None, columns: list[Any], buckets: Buckets
) -> list[Line]:
    filled = np.flatnonzero(buckets.steps >= 0)
    steps = buckets.steps[filled].tolist()
    lines = []
    at = 0
    for column in columns:
        here = slice(at, at + len(column))
        at += len(column)
        low, high, last = (a[filled, here] for a in (buckets.low, buckets.high, buckets.last))
        line_layer = None if metric.head is None else axis.heads[column[0]][0]
        worst_head = None
        if metric.head is not None and head is None:
            size = np.fmax(np.abs(low), np.abs(high))
            known = ~np.all(np.isnan(size), axis=1)
            worst = np.where(known, np.argmax(np.where(np.isnan(size), -1.0, size), axis=1), 0)
            low, high, last = (np.take_along_axis(a, worst[:, None], axis=1) for a in (low, high, last))
            numbers = [axis.heads[i][1] for i in column]
            worst_head = [numbers[w] if k else None for w, k in zip(worst, known, strict=True)]
        lines.append(
            Line(
                layer=line_layer,
                head=head if metric.head is not None else None,
                steps=steps,
                low=[number(v) for v in low[:, 0]],
                high=[number(v) for v in high[:, 0]],
                last=[number(v) for v in last[:, 0]],
                worst_head=worst_head,
            )
        )
    return lines


async def matrix(
    connection: AsyncConnection, run_id: int, run: str, metric: Metric, step: int | None, max_steps: int
) -> Matrix:
    """One per-head metric of every head at the newest step that is not after `step`."""
    axis = await axis_of(connection, run_id)
    query = LIVE_SAMPLES.with_only_columns(func.max(samples.c.step)).order_by(None).where(samples.c.run_id == run_id)
    if step is not None:
        query = query.where(samples.c.step <= step)
    found: int | None = (await connection.execute(query)).scalar()
    layers, heads = axis.layers, sorted({head for _, head in axis.heads})
    values = np.full((len(layers), len(heads)), np.nan)
    if found is not None:
        rows = (await connection.execute(LIVE_SAMPLES.where(samples.c.run_id == run_id, samples.c.step == found))).all()
        row_of, column_of = {n: i for i, n in enumerate(layers)}, {n: i for i, n in enumerate(heads)}
        for (layer, head), value in zip(
            axis.heads, merge(axis, found, rows, _arrays_of(metric)).head_values(metric), strict=True
        ):
            values[row_of[layer], column_of[head]] = value
    return Matrix(
        run=run,
        metric=metric.key,
        unit=metric.unit,
        step=found,
        layers=layers,
        heads=heads,
        values=[[number(v) for v in row] for row in values],
        steps=await _steps(connection, run_id, max_steps),
    )


async def _steps(connection: AsyncConnection, run_id: int, count: int) -> list[int]:
    if count == 0:
        return []
    query = select(samples.c.step).where(samples.c.run_id == run_id).distinct().order_by(samples.c.step)
    steps = (await connection.execute(query)).scalars().all()
    if len(steps) <= count:
        return list(steps)
    picked = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    return [steps[i] for i in picked]
