"""Curves against the step, and the heads of a run at one step, from the roll-ups and samples of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from pydantic import Field
from sqlalchemy import Connection, Row, func, select

from foreshock.contract.environment import meant
from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.slots import SLOT_COUNT, Floats
from foreshock.server.models import Number, Response
from foreshock.server.problems import ProblemError
from foreshock.server.readings import (
    COARSE,
    FINE,
    LIVE_SAMPLES,
    RUN_LEVEL,
    SERIES_KEYS,
    Axis,
    MergedSteps,
    Spans,
    arrays_of,
    axis_of,
    built_spans,
    merge,
    read,
    stream_chunks,
)
from foreshock.server.store.schema import boots, rollups, samples


class CurveLine(Response):
    """One curve, without points where the run lacks the head.

    The four lists have one entry per point; a point spans the steps since the one before, and keeps their minimum and
    maximum.
    """

    metric: str
    unit: str
    layer: int | None
    head: int | None = Field(description="null for a run-level metric, and for the worst head of a layer")
    steps: list[int]
    low: list[Number]
    high: list[Number]
    last: list[Number]
    worst_head: list[int | None] | None = Field(
        default=None, description="for the worst head of a layer: which head it is, the largest in absolute value"
    )


class Curves(Response):
    """Curves over the same steps, in the order in which they were asked for; at most max_points points each.

    Where no layer was named for a metric of heads, the lines of all layers stand in its place.
    """

    run: str
    lines: list[CurveLine]
    unknown: list[str] = Field(description="lines that were asked for of a layer or head that the run does not have")


class Matrix(Response):
    """One per-head metric at the newest step that is not after the one asked for.

    Spectral norms, which are measured now and then, are shown as they were last measured.
    """

    run: str
    metric: str
    unit: str
    step: int | None = Field(description="the step shown; null when there is no sample at or before the one asked for")
    measured_step: int | None = Field(description="by when the values were measured; null when they never were")
    layers: list[int]
    heads: list[int]
    next_layer: int | None = Field(
        default=None, description="the first layer that did not fit; ask again with from_layer for it and those after"
    )
    values: list[list[Number]] = Field(description="[layers, heads]; null where a layer lacks the head, or its count")
    steps: list[int] = Field(description="steps that can be asked for, thinned to at most max_steps, ascending")


_SAMPLES_READ: Final = 2000
_BYTES_READ: Final = 256 * 2**20
"""Most samples, and most bytes of them, that are read one by one where roll-ups would draw too few points."""
Ends = tuple[int | None, int | None]
_VALUES: Final = 2**24
_VALUES_OF_POINT: Final = 32
"""Most numbers of an answer: those of the heads that it is read from, and for each point what its four
Python numbers take. Beyond, lines have fewer points: many lines of a wide model would fill the memory."""


@dataclass(frozen=True)
class Curve:
    """What is asked for: a metric of the run, of one head, or of the worst head of a layer, or of each layer."""

    metric: Metric
    layer: int | None = None
    head: int | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Where its Spans stand in a Drawing."""
        return self.metric.key, RUN_LEVEL if self.layer is None else self.layer

    def heads(self, axis: Axis) -> list[int]:
        """Where its heads stand on the axis; none for what the run does not have."""
        own = axis.columns.get(self.place[1], slice(0, 0))
        return [i for i in range(own.start, own.stop) if self.head in (None, axis.heads[i][1])]

    def each(self, axis: Axis) -> "list[Curve]":
        """The curves that are drawn for it: of a metric of heads without a layer one for each layer."""
        if self.metric.head is None or self.layer is not None:
            return [self]
        return [replace(self, layer=layer) for layer in axis.layers]

    @property
    def name(self) -> str:
        """As it is asked for."""
        return ":".join(str(part) for part in (self.metric.key, self.layer, self.head) if part is not None)


def metric_of(key: str, *, per_head: bool = False) -> Metric:
    """The metric of this key. Raises ProblemError for one that cannot be shown in the wanted way."""
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
    numbers = [int(part) for part in where if part.isascii() and part.isdigit() and len(part) < 7]
    if len(numbers) != len(where) or len(where) > (2 if metric.head else 0):
        raise ProblemError(
            422,
            f"line {text[:80]!r} has another form than METRIC, for a metric of the run or the worst head of every "
            "layer, METRIC:LAYER, for the worst head of a layer, or METRIC:LAYER:HEAD.",
        )
    return Curve(metric, *numbers)


@dataclass(frozen=True)
class Window:
    """The steps that are drawn, both ends included, and in how many points at most."""

    run_id: int
    first: int
    last: int
    points: int
    reach: tuple[int, int]
    """The same steps, and beyond the ends those at which nothing was sampled."""

    @property
    def width(self) -> int:
        """Steps of one point."""
        return max(1, math.ceil((self.last - self.first + 1) / self.points))


class Drawing:
    """Curves that are being drawn: the Spans of each metric and layer, over those of its heads that are wanted."""

    def __init__(self, axis: Axis, curves: Sequence[Curve], window: Window) -> None:
        self.axis, self.window = axis, window
        wanted = {i for curve in curves for i in curve.heads(axis)}
        if any(curve.metric.worst_of for curve in curves):
            wanted = set(range(len(axis.heads)))  # it is read from every head
        self.picked = np.array(sorted(wanted), dtype=np.intp)
        self.only = axis.only(self.picked)
        self.columns = {**self.only.columns, RUN_LEVEL: slice(0, 1)}
        self.spans: dict[tuple[str, int], Spans] = {}
        for curve in curves:
            own = self.columns.get(curve.place[1])
            if own is not None:
                self.spans[curve.place] = Spans.for_points(
                    window.first, window.last, window.points, own.stop - own.start
                )

    def take_in(self, connection: Connection) -> None:
        """Read roll-ups where they are fine enough or the samples are too many, and the samples of the rest."""
        window = self.window
        within = samples.c.run_id == window.run_id, samples.c.step.between(window.first, window.last)
        count = connection.execute(select(func.count()).select_from(samples).where(*within)).scalar_one()
        size = count * len(self.axis.heads) * SLOT_COUNT * 8
        many = count > _SAMPLES_READ or (size > _BYTES_READ and len(self.picked) > 0)
        rolled: set[int] = set()
        if many or window.width >= FINE:
            rolled = built_spans(connection, window.run_id, *window.reach)
            self._take_rolled(connection, rolled)
        names = frozenset[str]().union(*(arrays_of(BY_KEY[key]) for key, _ in self.spans))
        wanted = LIVE_SAMPLES.where(samples.c.run_id == window.run_id)
        if not names:
            wanted = wanted.with_only_columns(*(c for c in wanted.selected_columns if c.key != "arrays"))
        for begin, end in _gaps(window.first, window.last, rolled):
            with stream_chunks(connection, wanted.where(samples.c.step.between(begin, end))) as chunks:
                for chunk in chunks:
                    self._take_readings(merge(self.only, chunk, names))

    def _take_rolled(self, connection: Connection, rolled: set[int]) -> None:
        keys, layers = {key for key, _ in self.spans}, {layer for _, layer in self.spans}
        width = COARSE if self.window.width >= 2 * FINE else FINE
        found = read(connection, self.axis, self.window.run_id, width, keys, layers, rolled)
        first = {layer: own.start for layer, own in self.axis.columns.items()}
        for place, part in found.items():
            spans = self.spans.get(place)
            if spans is None:
                continue
            values = part.values
            if place[1] != RUN_LEVEL:
                values = values[:, :, self.picked[self.columns[place[1]]] - first[place[1]]]
            low, high, last = values.transpose(1, 0, 2)
            spans.add(part.steps, low, high, last, part.bad)

    def _take_readings(self, readings: MergedSteps) -> None:
        metrics = [BY_KEY[key] for key in {key for key, _ in self.spans}]
        of_heads = {metric.key: readings.head_values(metric) for metric in metrics if metric.head is not None}
        for (key, layer), spans in self.spans.items():
            if key in of_heads:
                values, bad = of_heads[key][:, self.columns[layer]], None
            else:
                run_values, given = readings.run_values(key)
                values, bad = run_values[:, None], given & np.isnan(run_values)
            spans.add(readings.steps, values, values, values, bad)

    def line(self, curve: Curve) -> CurveLine:
        """What was drawn; no points for a head that the run does not have."""
        spans = self.spans.get(curve.place)
        of_layer = slice(0, 0) if curve.layer is None else self.only.columns.get(curve.layer, slice(0, 0))
        heads = [head for _, head in self.only.heads[of_layer]]
        if spans is None or (curve.head is not None and curve.head not in heads):
            return _empty(curve)
        filled = np.flatnonzero(spans.steps >= 0)
        low, high, last = (values[filled] for values in (spans.low, spans.high, spans.last))
        worst_head = None
        if curve.metric.head is None or curve.head is not None:
            at = np.full((len(filled), 1), 0 if curve.head is None else heads.index(curve.head))
        else:
            size = np.fmax(curve.metric.badness(low), curve.metric.badness(high))
            known = ~np.isnan(size).all(axis=1)
            at = np.argmax(np.where(np.isnan(size), -np.inf, size), axis=1)[:, None]
            worst_head = [heads[w] if k else None for w, k in zip(at[:, 0].tolist(), known.tolist(), strict=True)]
        low, high, last = (np.take_along_axis(values, at, axis=1)[:, 0] for values in (low, high, last))
        finals = _numbers(last)
        for i in np.flatnonzero(spans.bad[filled]):
            finals[i] = math.nan
        return CurveLine(
            metric=curve.metric.key,
            unit=curve.metric.unit,
            layer=curve.layer,
            head=curve.head,
            steps=spans.steps[filled].tolist(),
            low=_numbers(low),
            high=_numbers(high),
            last=finals,
            worst_head=worst_head,
        )


def draw(connection: Connection, axis: Axis, curves: Sequence[Curve], window: Window) -> list[CurveLine]:
    """The line of each curve; without points for a head that the run does not have."""
    drawing = Drawing(axis, curves, window)
    drawing.take_in(connection)
    return [drawing.line(curve) for curve in curves]


def curves(connection: Connection, run: Row[Any], wanted: Sequence[Curve], ends: Ends, max_points: int) -> Curves:
    """Many curves in one pass over the store; see answers.Curves. For work beside the event loop."""
    axis = axis_of(connection, run.id)
    each = [one for curve in wanted for one in curve.each(axis)]
    unknown = [one.name for one in each if one.layer is not None and not one.heads(axis)]
    lines = [_empty(curve) for curve in each]
    lowest, highest = edges(connection, run.id)
    if lowest is not None and highest is not None:
        first, last = max(lowest, ends[0] or 0), min(highest, highest if ends[1] is None else ends[1])
        reach = 0 if first == lowest else first, last // COARSE * COARSE + COARSE - 1 if last == highest else last
        values = sum(_VALUES_OF_POINT + len(curve.heads(axis)) for curve in each)
        points = max(1, min(max_points, _VALUES // max(1, values)))
        if first <= last:
            lines = draw(connection, axis, each, Window(run.id, first, last, points, reach))
    return Curves(run=run.name, lines=lines, unknown=unknown)


def edges(connection: Connection, run_id: int) -> Ends:
    """The first and the last step of a run that count. Either is near an end of the index."""
    own = LIVE_SAMPLES.with_only_columns(samples.c.step).where(samples.c.run_id == run_id).order_by(None).limit(1)
    first = connection.execute(own.order_by(samples.c.step)).scalar()
    return first, connection.execute(own.order_by(samples.c.step.desc())).scalar()


def as_json(answer: Curves) -> bytes:
    """An answer as it travels, written line by line: written at once, many lines would hold every other thread up."""
    head = answer.model_dump_json(exclude={"lines"}).encode()
    lines = b",".join(line.model_dump_json().encode() for line in answer.lines)
    return head[:-1] + b',"lines":[' + lines + b"]}"


def _empty(curve: Curve) -> CurveLine:
    metric, layer, head = curve.metric, curve.layer, curve.head
    return CurveLine(metric=metric.key, unit=metric.unit, layer=layer, head=head, steps=[], low=[], high=[], last=[])


def number(value: float) -> float | None:
    """A value for an answer: NaN, where nothing was counted, becomes null."""
    return None if math.isnan(value) else float(value)


def _numbers(values: Floats) -> list[float | None]:
    """Values for an answer: NaN, where nothing was counted, becomes null."""
    found: list[float | None] = values.tolist()
    for i in np.flatnonzero(np.isnan(values)):
        found[i] = None
    return found


def _gaps(first: int, last: int, rolled: set[int]) -> list[tuple[int, int]]:
    """The parts of [first, last] outside the coarse spans `rolled`."""
    gaps = []
    begin = first
    for span in sorted(rolled):
        if begin < span * COARSE:
            gaps.append((begin, span * COARSE - 1))
        begin = (span + 1) * COARSE
    return [*gaps, (begin, last)] if begin <= last else gaps


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
