"""Curves by step, and the matrix of all heads at one step, from the roll-ups and samples of a run."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, func, select

from foreshock.contract.environment import meant
from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.slots import SLOT_COUNT, Floats
from foreshock.server.models import CurveLine, Curves, Matrix
from foreshock.server.problems import ProblemError
from foreshock.server.readings import (
    BUCKET,
    LIVE_SAMPLES,
    SERIES_KEYS,
    SPAN,
    WHOLE,
    Axis,
    Values,
    arrays_of,
    axis_of,
    built_spans,
    grouped,
    joined,
    merge,
    merged_steps,
    rolled_up,
)
from foreshock.server.store.schema import rollups, samples

_SAMPLES_READ: Final = 2000
_BYTES_READ: Final = 256 * 2**20
"""Maximum number of samples, and of their bytes, to read instead of roll-ups if these would give too few points."""
Ends = tuple[int | None, int | None]
Place = tuple[str, int]
_POINTS: Final = 2**19
"""Maximum number of points in a response, to limit its memory: with many lines, each has fewer points."""


@dataclass(frozen=True)
class Curve:
    """A requested curve: a metric of the run, of one head, or of the worst head of one layer or of every layer."""

    metric: Metric
    layer: int | None = None
    head: int | None = None

    @property
    def place(self) -> Place:
        """The place of its values in the roll-ups: the metric's key, and a layer or WHOLE."""
        return self.metric.key, WHOLE if self.layer is None or self.head is None else self.layer

    def column(self, axis: Axis) -> int | None:
        """Return the column of its values at that place; None for a layer or head that the run does not have."""
        if self.layer is None:
            return 0
        own = axis.columns.get(self.layer)
        if own is None:
            return None
        if self.head is None:
            return axis.layers.index(self.layer)
        found = np.flatnonzero(axis.numbers[own] == self.head)
        return int(found[0]) if len(found) else None

    def each(self, axis: Axis) -> "list[Curve]":
        """Return the curves to draw: one for each layer if it is a per-head metric without a layer, else itself."""
        if self.metric.head is None or self.layer is not None:
            return [self]
        return [replace(self, layer=layer) for layer in axis.layers]

    @property
    def name(self) -> str:
        """The text that requests it, as read by `curve_of`."""
        return ":".join(str(part) for part in (self.metric.key, self.layer, self.head) if part is not None)


def metric_of(key: str, *, per_head: bool = False) -> Metric:
    """Return the metric with this key. Raises ProblemError if it does not exist or cannot be shown in this way."""
    metric = BY_KEY.get(key)
    if metric is None or (metric.head is None and (per_head or not metric.has_series)):
        allowed = [m.key for m in BY_KEY.values() if m.head is not None]
        allowed += [] if per_head else list(SERIES_KEYS)
        what = f"does not exist; {meant(key, allowed)}" if metric is None else "cannot be shown in this way; "
        raise ProblemError(422, f"metric {key[:64]!r} {what}allowed are {', '.join(allowed)}.")
    return metric


def curve_of(text: str) -> Curve:
    """Read METRIC, METRIC:LAYER or METRIC:LAYER:HEAD. Raises ProblemError for anything else."""
    key, *where = text.split(":")
    metric = metric_of(key)
    if where and metric.head is None:
        raise ProblemError(422, f"{key} is a metric of the whole run; leave out the layer.")
    numbers = [int(part) for part in where if part.isascii() and part.isdigit() and len(part) < 7]
    if len(numbers) != len(where) or len(where) > 2:
        raise ProblemError(
            422,
            f"line {text[:80]!r} is malformed; use METRIC, for a metric of the run or the worst head of every layer, "
            "METRIC:LAYER, for the worst head of a layer, or METRIC:LAYER:HEAD.",
        )
    return Curve(metric, *numbers)


@dataclass(frozen=True)
class Window:
    """The steps to draw, including both ends, and the maximum number of points."""

    run_id: int
    first: int
    last: int
    points: int
    reach: tuple[int, int]
    """The same steps, extended at either end of the run by steps that have no samples."""

    @property
    def width(self) -> int:
        """Steps of one point."""
        return max(1, math.ceil((self.last - self.first + 1) / self.points))

    def points_of(self, key: str, found: Values) -> Values:
        """Reduce a metric's values to one row for each point."""
        return grouped(BY_KEY[key], found, self.width, self.first)


def draw(connection: Connection, axis: Axis, curves: Sequence[Curve], window: Window) -> list[CurveLine]:
    """Return the line of each curve; it has no points if the run does not have the head.

    Reads roll-ups if they are fine enough or there are too many samples, and samples for all other steps.
    """
    columns = [curve.column(axis) for curve in curves]
    picked: dict[Place, list[int]] = defaultdict(list)
    for curve, column in zip(curves, columns, strict=True):
        if column is not None and column not in picked[curve.place]:
            picked[curve.place].append(column)
    parts: dict[Place, list[Values]] = defaultdict(list)
    names = frozenset[str]().union(*(arrays_of(BY_KEY[key]) for key, _ in picked))
    rolled = _rolled(connection, window, SLOT_COUNT * 8 * len(axis.heads) if names else 0)
    for (key, layer), own in picked.items():
        heads = axis.columns[layer] if layer != WHOLE else range(len(axis.layers) if BY_KEY[key].head else 1)
        found = rolled_up(connection, window.run_id, key, layer, heads.stop - heads.start, rolled)
        parts[key, layer].append(window.points_of(key, Values(found.steps, found.values[:, :, own])))
    wanted = LIVE_SAMPLES.where(samples.c.run_id == window.run_id)
    if not names:
        wanted = wanted.with_only_columns(*(c for c in wanted.selected_columns if c.key != "arrays"))
    for begin, end in _gaps(window.first, window.last, rolled):
        for some in merged_steps(connection, axis, wanted.where(samples.c.step.between(begin, end)), names):
            for (key, layer), own in picked.items():
                if layer == WHOLE and BY_KEY[key].head is not None:
                    values = some.worst_of(BY_KEY[key], axis, [axis.layers[column] for column in own])
                else:
                    first = 0 if layer == WHOLE else axis.columns[layer].start
                    values = some.values_of(BY_KEY[key], [first + column for column in own])
                parts[key, layer].append(window.points_of(key, values))
    drawn = {place: window.points_of(place[0], joined(own)) for place, own in parts.items()}
    lines = []
    for curve, column in zip(curves, columns, strict=True):
        line = None
        if column is not None:
            found = drawn[curve.place]
            line = Values(found.steps, found.values[:, :, picked[curve.place].index(column)])
        lines.append(_line(curve, line))
    return lines


def _rolled(connection: Connection, window: Window, sample_bytes: int) -> set[int]:
    """Return the spans to draw from roll-ups; `sample_bytes`: bytes to read of each sample."""
    if window.width < BUCKET:
        within = samples.c.run_id == window.run_id, samples.c.step.between(window.first, window.last)
        count = connection.execute(select(func.count()).select_from(samples).where(*within)).scalar_one()
        if count <= _SAMPLES_READ and count * sample_bytes <= _BYTES_READ:
            return set()
    return built_spans(connection, window.run_id, *window.reach)


def _numbers(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    found: list[float | None] = values.tolist()
    for at in np.flatnonzero(np.isnan(values)):
        found[at] = None
    return found


def _line(curve: Curve, found: Values | None = None) -> CurveLine:
    """Return the line of a curve; `found`: its values, of one column."""
    steps, values = (found.steps.tolist(), found.values.T) if found is not None else ([], np.empty((3, 0)))
    low, high, last, *marks = map(_numbers, values)
    of_worst = curve.metric.head is not None and curve.head is None
    if marks and not of_worst:
        last = [math.nan if mark else value for mark, value in zip(marks[0], last, strict=True)]
    return CurveLine(
        metric=curve.metric.key,
        unit=curve.metric.unit,
        layer=curve.layer,
        head=curve.head,
        steps=steps,
        low=low,
        high=high,
        last=last,
        worst_head=[None if mark is None else int(mark) for mark in marks[0]] if of_worst and marks else None,
    )


def curves(connection: Connection, run: Row[Any], wanted: Sequence[Curve], ends: Ends, max_points: int) -> Curves:
    """Return many curves in one pass over the store; see models.Curves. Call it outside the event loop."""
    axis = axis_of(connection, run.id)
    each = [one for curve in wanted for one in curve.each(axis)]
    unknown = [one.name for one in each if one.column(axis) is None]
    lines = [_line(curve) for curve in each]
    lowest, highest = edges(connection, run.id)
    if lowest is not None and highest is not None:
        first, last = max(lowest, ends[0] or 0), min(highest, highest if ends[1] is None else ends[1])
        reach = 0 if first == lowest else first, last // SPAN * SPAN + SPAN - 1 if last == highest else last
        points = max(1, min(max_points, _POINTS // max(1, len(each))))
        if first <= last:
            lines = draw(connection, axis, each, Window(run.id, first, last, points, reach))
    return Curves(run=run.name, lines=lines, unknown=unknown)


def edges(connection: Connection, run_id: int, until: int | None = None) -> Ends:
    """Return the first and the last valid step of a run, up to `until`. Both are found near an end of the index."""
    own = LIVE_SAMPLES.with_only_columns(samples.c.step).where(samples.c.run_id == run_id).order_by(None).limit(1)
    if until is not None:
        own = own.where(samples.c.step <= until)
    first = connection.execute(own.order_by(samples.c.step)).scalar()
    return first, connection.execute(own.order_by(samples.c.step.desc())).scalar()


def as_json(answer: Curves) -> bytes:
    """Encode a response line by line, because encoding many lines at once would block all other threads."""
    head = answer.model_dump_json(exclude={"lines"}).encode()
    lines = b",".join(line.model_dump_json().encode() for line in answer.lines)
    return head[:-1] + b',"lines":[' + lines + b"]}"


def _gaps(first: int, last: int, rolled: set[int]) -> list[tuple[int, int]]:
    """Return the parts of [first, last] outside the spans `rolled`."""
    gaps = []
    begin = first
    for span in sorted(rolled):
        if begin < span * SPAN:
            gaps.append((begin, span * SPAN - 1))
        begin = (span + 1) * SPAN
    return [*gaps, (begin, last)] if begin <= last else gaps


_CELLS: Final = 2**18
"""Maximum number of values in a response: layers with different head numbers need a wide matrix of mostly nulls."""
_LOOK_BACK: Final = 128
"""Samples searched for a metric that only some samples contain; older values are found in the roll-ups."""


def matrix(
    connection: Connection,
    run_id: int,
    run: str,
    metric: Metric,
    step: int | None,
    max_steps: int,
    from_layer: int = 0,
) -> Matrix:
    """Return a per-head metric of every head at `step`, or at the newest step before it; see models.Matrix."""
    axis = axis_of(connection, run_id)
    _, found = edges(connection, run_id, step)
    heads = sorted({head for layer, head in axis.heads if layer >= from_layer})
    asked = [layer for layer in axis.layers if layer >= from_layer]
    fit = max(1, _CELLS // max(1, len(heads)))
    layers = asked[:fit]
    values = np.full((len(layers), len(heads)), np.nan)
    measured = None
    if found is not None and axis.heads:
        measured, of_heads = _measured(connection, axis, run_id, metric, found)
        for row, own in enumerate(axis.columns[layer] for layer in layers):
            values[row, np.searchsorted(heads, axis.numbers[own])] = of_heads[own]
    return Matrix(
        run=run,
        metric=metric.key,
        unit=metric.unit,
        step=found,
        measured_step=measured,
        layers=layers,
        heads=heads,
        next_layer=asked[fit] if len(asked) > fit else None,
        values=[_numbers(row) for row in values],
        steps=_steps(connection, run_id, max_steps),
    )


def _measured(connection: Connection, axis: Axis, run_id: int, metric: Metric, step: int) -> tuple[int | None, Floats]:
    """Return the step of measurement and a metric's values at `step`; for a spectral norm the last measured ones."""
    own, names = LIVE_SAMPLES.where(samples.c.run_id == run_id), arrays_of(metric)
    steps = own.with_only_columns(samples.c.step).order_by(None).where(samples.c.step <= step).distinct()
    last = steps.order_by(samples.c.step.desc()).limit(_LOOK_BACK if metric.head and metric.head.now_and_then else 1)
    built, bucket = built_spans(connection, run_id, 0, step // SPAN * SPAN + SPAN), step // BUCKET * BUCKET
    for earlier in connection.execute(last).scalars().all():
        if earlier < bucket and earlier // SPAN in built:
            return _rolled_up(connection, axis, run_id, metric, bucket, built)
        rows = connection.execute(own.where(samples.c.step == earlier)).all()
        values: Floats = merge(axis, rows, names).head_values(metric)[0]
        if not np.isnan(values).all():
            return earlier, values
    return None, np.full(len(axis.heads), np.nan)


def _rolled_up(
    connection: Connection, axis: Axis, run_id: int, metric: Metric, before: int, built: set[int]
) -> tuple[int | None, Floats]:
    """Return the last step and the last values of the newest bucket that ends before `before` and has values."""
    own = rollups.c.run_id == run_id, rollups.c.metric == metric.key, rollups.c.layer == WHOLE
    newest = select(func.max(rollups.c.span)).where(*own, rollups.c.span < before // SPAN)
    for span in (before // SPAN, connection.execute(newest).scalar()):
        if span not in built:
            continue
        steps, values = -1, np.full(len(axis.heads), np.nan)
        for layer, columns in axis.columns.items():
            found = rolled_up(connection, run_id, metric.key, layer, columns.stop - columns.start, {span})
            if len(earlier := np.flatnonzero(found.steps < before)):
                steps = max(steps, int(found.steps[earlier[-1]]))
                values[columns] = found.values[earlier[-1], 2]
        if steps >= 0:
            return steps, values
    return None, np.full(len(axis.heads), np.nan)


def _steps(connection: Connection, run_id: int, count: int) -> list[int]:
    """Return at most `count` sampled steps: the first, the last, and those next to evenly spaced steps."""
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
    # A loose index scan: each step is found from the previous one, whatever the number of steps between them.
    found = select(func.min(samples.c.step).label("step")).where(own).cte("found", recursive=True)
    after = select(func.min(samples.c.step)).where(own, samples.c.step >= found.c.step + width).scalar_subquery()
    found = found.union_all(select(after).where(found.c.step.is_not(None)))
    thinned = connection.execute(select(found.c.step).where(found.c.step.is_not(None))).scalars().all()
    return sorted({*thinned, last})[-count:]
