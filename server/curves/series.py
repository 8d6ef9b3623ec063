"""Metrics against the step: what may be asked for, and the answers."""

import math
from collections.abc import Sequence
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import BY_KEY
from foreshock.contract.environment import meant
from foreshock.contract.metric import Metric
from foreshock.server.access.problems import ProblemError
from foreshock.server.curves.answers import CurveLine, Curves, Line, Series
from foreshock.server.curves.drawing import Curve, Window, draw
from foreshock.server.curves.merging import SERIES_KEYS, Axis, axis_of
from foreshock.server.curves.rollups import COARSE, Roller
from foreshock.server.store.schema import samples

Ends = tuple[int | None, int | None]
_VALUES: Final = 2**24
_VALUES_OF_POINT: Final = 32
"""An answer takes so many numbers at most: those of the heads that it is read from, and for each point what its four
Python numbers take. Beyond, lines have fewer points: many lines of a wide model would fill the memory."""


def number(value: float) -> float | None:
    """A value for an answer: NaN, where nothing was counted, becomes null."""
    return None if math.isnan(value) else float(value)


def as_json(answer: Series | Curves) -> bytes:
    """An answer as it travels, written line by line: written at once, many lines would hold every other thread up."""
    head = answer.model_dump_json(exclude={"lines"}).encode()
    lines = b",".join(line.model_dump_json().encode() for line in answer.lines)
    return head[:-1] + b',"lines":[' + lines + b"]}"


def metric_of(key: str, *, per_head: bool = False) -> Metric:
    """A metric that has such a view. Raises ProblemError for others."""
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
    if len(numbers) != len(where) or len(where) > 2 or bool(where) != (metric.head is not None):
        raise ProblemError(
            422,
            f"line {text[:80]!r} has another form than METRIC, for a metric of the run, METRIC:LAYER, for the worst "
            "head of a layer, or METRIC:LAYER:HEAD.",
        )
    return Curve(metric, *numbers)


async def series(
    connection: AsyncConnection,
    roller: Roller,
    run_id: int,
    run: str,
    metric: Metric,
    layer: int | None,
    head: int | None,
    ends: Ends,
    max_points: int,
) -> Series:
    """One metric against the step; see models.Series."""
    axis = await axis_of(connection, run_id)
    if head is not None and layer is None:
        raise ProblemError(422, "head needs layer: heads are numbered within their layer.")
    wanted = [Curve(metric)]
    if metric.head is not None:
        _check_on_axis(axis, run, layer, head)
        wanted = [Curve(metric, one, head) for one in (axis.layers if layer is None else [layer])]
    lines = await _lines(connection, roller, axis, run_id, wanted, ends, max_points)
    return Series(run=run, metric=metric.key, unit=metric.unit, lines=[line for line in lines if line])


async def curves(
    connection: AsyncConnection,
    roller: Roller,
    run_id: int,
    run: str,
    wanted: Sequence[Curve],
    ends: Ends,
    max_points: int,
) -> Curves:
    """Many curves in one pass over the store; see models.Curves."""
    axis = await axis_of(connection, run_id)
    lines = await _lines(connection, roller, axis, run_id, wanted, ends, max_points)
    found = []
    for curve, line in zip(wanted, lines, strict=True):
        drawn = line or Line(layer=curve.layer, head=curve.head, steps=[], low=[], high=[], last=[])
        found.append(CurveLine(metric=curve.metric.key, unit=curve.metric.unit, **drawn.__dict__))
    return Curves(run=run, lines=found)


async def _lines(
    connection: AsyncConnection,
    roller: Roller,
    axis: Axis,
    run_id: int,
    wanted: Sequence[Curve],
    ends: Ends,
    max_points: int,
) -> list[Line | None]:
    lowest, highest = await edges(connection, run_id)
    if lowest is None or highest is None:
        return [None] * len(wanted)
    first, last = max(lowest, ends[0] or 0), min(highest, highest if ends[1] is None else ends[1])
    if first > last:
        return [None] * len(wanted)
    reach = 0 if first == lowest else first, last // COARSE * COARSE + COARSE - 1 if last == highest else last
    values = sum(_VALUES_OF_POINT + len(curve.heads(axis)) for curve in wanted)
    points = max(1, min(max_points, _VALUES // max(1, values)))
    return await draw(connection, roller, axis, wanted, Window(run_id, first, last, points, reach))


def _check_on_axis(axis: Axis, run: str, layer: int | None, head: int | None) -> None:
    if layer is not None and layer not in axis.layers:
        raise ProblemError(404, f"Run {run} has no layer {layer}.")
    if layer is not None and head is not None and (layer, head) not in axis.index():
        raise ProblemError(404, f"Run {run} has no layer {layer} head {head}.")


async def edges(connection: AsyncConnection, run_id: int) -> tuple[int | None, int | None]:
    """The first and the last step of a run. Each by itself is one look into the index; together they would scan it."""
    own = samples.c.run_id == run_id
    lowest = select(func.min(samples.c.step)).where(own).scalar_subquery()
    highest = select(func.max(samples.c.step)).where(own).scalar_subquery()
    first, last = (await connection.execute(select(lowest, highest))).one()
    return first, last
