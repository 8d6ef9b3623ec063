"""The heads of a run side by side at one step."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, func, select

from foreshock.contract.metrics.metric import Metric
from foreshock.contract.slots import Floats
from foreshock.server.curves.answers import Matrix
from foreshock.server.curves.drawing import edges, number
from foreshock.server.curves.merging import LIVE_SAMPLES, Axis, arrays_of, axis_of, merge
from foreshock.server.curves.rollups import COARSE, FINE, built_spans, read
from foreshock.server.store.schema import boots, rollups, samples

_CELLS: Final = 2**18
"""So many values an answer holds at most: layers of which each has other head numbers make a wide matrix of nulls."""
_LOOK_BACK: Final = 128
"""Samples looked through for a metric that is measured now and then; older ones are found in the roll-ups."""


def matrix(
    connection: Connection,
    run_id: int,
    run: str,
    metric: Metric,
    step: int | None,
    max_steps: int,
    from_layer: int = 0,
) -> Matrix:
    """One per-head metric of every head at the newest step that is not after `step`; see answers.Matrix."""
    axis = axis_of(connection, run_id)
    query = LIVE_SAMPLES.with_only_columns(samples.c.step).where(samples.c.run_id == run_id).order_by(None)
    if step is not None:
        query = query.where(samples.c.step <= step)
    found: int | None = connection.execute(query.order_by(samples.c.step.desc()).limit(1)).scalar()
    heads = sorted({head for layer, head in axis.heads if layer >= from_layer})
    asked = [layer for layer in axis.layers if layer >= from_layer]
    fit = max(1, _CELLS // max(1, len(heads)))
    layers = asked[:fit]
    values = np.full((len(layers), len(heads)), np.nan)
    measured = None
    if found is not None and axis.heads:
        measured, of_heads = _measured(connection, axis, run_id, metric, found)
        row_of, column_of = {n: i for i, n in enumerate(layers)}, {n: i for i, n in enumerate(heads)}
        for (layer, head), value in zip(axis.heads, of_heads, strict=True):
            if layer in row_of:
                values[row_of[layer], column_of[head]] = value
    return Matrix(
        run=run,
        metric=metric.key,
        unit=metric.unit,
        step=found,
        measured_step=measured,
        layers=layers,
        heads=heads,
        next_layer=asked[fit] if len(asked) > fit else None,
        values=[[number(value) for value in row] for row in values],
        steps=_steps(connection, run_id, max_steps),
    )


def _measured(connection: Connection, axis: Axis, run_id: int, metric: Metric, step: int) -> tuple[int | None, Floats]:
    """The metric at `step`; a spectral norm, measured now and then, as it was by then; and when it was measured."""
    own = LIVE_SAMPLES.where(samples.c.run_id == run_id)
    values = _read(axis, connection.execute(own.where(samples.c.step == step)).all(), metric)
    if not np.isnan(values).all():
        return step, values
    if metric.head is None or not metric.head.now_and_then:
        return None, values
    built = built_spans(connection, run_id, 0, step // COARSE * COARSE + COARSE)
    bucket = step // FINE * FINE
    steps = select(samples.c.step).join(boots, samples.c.boot_id == boots.c.id).where(samples.c.run_id == run_id)
    before = steps.where(samples.c.step < step).distinct().order_by(samples.c.step.desc()).limit(_LOOK_BACK)
    earlier: int
    for earlier in connection.execute(before).scalars().all():
        if earlier < bucket and earlier // COARSE in built:
            break
        values = _read(axis, connection.execute(own.where(samples.c.step == earlier)).all(), metric)
        if not np.isnan(values).all():
            return earlier, values
    return _rolled_up(connection, axis, run_id, metric, bucket, built)


def _read(axis: Axis, rows: Sequence[Row[Any]], metric: Metric) -> Floats:
    if not rows:
        return np.full(len(axis.heads), np.nan)
    values: Floats = merge(axis, rows, arrays_of(metric)).head_values(metric)[0]
    return values


def _rolled_up(
    connection: Connection, axis: Axis, run_id: int, metric: Metric, before: int, built: set[int]
) -> tuple[int | None, Floats]:
    """The last value of the newest bucket that ends before a step and has one, and the bucket's last step."""
    key = (rollups.c.run_id == run_id, rollups.c.width == COARSE, rollups.c.metric == metric.key)
    older = rollups.c.span < before // COARSE
    newest = [select(func.max(rollups.c.span)).where(*key, rollups.c.layer == n, older) for n in axis.layers]
    row = connection.execute(select(*(query.scalar_subquery() for query in newest))).one()
    columns = axis.columns
    for span in (before // COARSE, max((span for span in row if span is not None), default=-1)):
        if span not in built:
            continue
        steps, values = -1, np.full(len(axis.heads), np.nan)
        found = read(connection, axis, run_id, FINE, [metric.key], axis.layers, {span})
        for (_, layer), part in found.items():
            held = np.flatnonzero((part.steps < before) & ~np.isnan(part.values[:, 2]).all(axis=1))
            if len(held):
                steps = max(steps, int(part.steps[held[-1]]))
                values[columns[layer]] = part.values[held[-1], 2]
        if steps >= 0:
            return steps, values
    return None, np.full(len(axis.heads), np.nan)


def _steps(connection: Connection, run_id: int, count: int) -> list[int]:
    """Steps that were sampled, at most `count`: the first, the last, and the ones next to evenly spaced steps."""
    if count == 0:
        return []
    own = samples.c.run_id == run_id
    known = select(samples.c.step).where(own).distinct().order_by(samples.c.step)
    some = connection.execute(known.limit(count + 1)).scalars().all()
    if len(some) <= count:
        return list(some)
    first, last = edges(connection, run_id)
    if first is None or last is None:
        return []
    width = math.ceil((last - first) / max(1, count - 2))
    # A loose scan of the index: each step is found from the one before, however many lie between.
    found = select(func.min(samples.c.step).label("step")).where(own).cte("found", recursive=True)
    after = select(func.min(samples.c.step)).where(own, samples.c.step >= found.c.step + width).scalar_subquery()
    found = found.union_all(select(after).where(found.c.step.is_not(None)))
    thinned = connection.execute(select(found.c.step).where(found.c.step.is_not(None))).scalars().all()
    return sorted({*thinned, last})[-count:]
