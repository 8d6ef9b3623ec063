"""Stores samples, merges the samples of all ranks to one reading per step and head, and builds roll-ups of them.

Samples are packed when they are written. A row that cannot be read is skipped, counted and logged, and does not affect
other runs. contract/wire.py ensures that every acknowledged sample is readable; rows of an earlier version, or of a
damaged disk, may not be.

Ranks merge in the fixed order (rank, boot, sequence), so the same samples always give the same bits. A head that a rank
does not have, or that no rank counted, has the value NaN, never zero.

Roll-ups store every metric over buckets of 128 steps, so that a run of months is drawn quickly. They are built in spans
of 1024 steps: one row for the heads of each layer, and one for the worst heads of all layers, so that a curve reads
only the rows it shows. A roll-up can always be rebuilt from its samples. Ingest counts the changes of each span; a
span is built in the background once the run has passed it, and changed spans are read from the samples instead.
"""

import asyncio
import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import BaseModel, RootModel, ValidationError
from sqlalchemy import Connection, Row, Select, and_, case, delete, desc, func, insert, or_, select, text, update

from foreshock.contract.metrics.catalog import BY_KEY, METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import AcrossRanks, Metric
from foreshock.contract.slots import OLDEST_SLOT_COUNT, SLOT_COUNT, Floats, fitted, identity_row, merge_words
from foreshock.contract.wire import PER_HEAD, HeadRef, Layer, Sample
from foreshock.server.store.database import Store, give_up_if_cancelled, lock_runs
from foreshock.server.store.schema import boots, rollup_spans, rollups, runs, samples, topologies

log = structlog.get_logger()
M = TypeVar("M", bound=BaseModel)
_REMEMBERED: Final = 10_000
unreadable: Final[dict[tuple[str, object], None]] = {}
"""(what, whose) of each row that could not be read since the process started, at most _REMEMBERED."""


def passed_over(what: str, whose: object, why: object) -> None:
    """Count a row that cannot be read, and log it the first time."""
    if (what, whose) not in unreadable and len(unreadable) < _REMEMBERED:
        unreadable[what, whose] = None
        log.error("a stored row cannot be read and was skipped", what=what, row=str(whose), why=str(why)[:300])


def read_back(kind: type[M], stored: str, what: str, whose: object) -> M | None:
    """Parse a stored message; None if it cannot be read. `what` and `whose` name the row in the log."""
    try:
        return kind.model_validate_json(stored)
    except ValidationError as error:
        passed_over(what, whose, error.errors(include_url=False, include_input=False)[0]["msg"])
        return None


class _Layers(RootModel[tuple[Layer, ...]]):
    """The stored form of a topology."""


@lru_cache(maxsize=256)
def layers_of(stored: str) -> tuple[Layer, ...]:
    """Return the layers of a stored topology; empty if it cannot be read."""
    found = read_back(_Layers, stored, "topology", hashlib.sha256(stored.encode()).hexdigest())
    return () if found is None else found.root


@lru_cache(maxsize=256)
def heads_of_layers(stored: str) -> tuple[HeadRef, ...]:
    """Return the (layer, head) of every row of a boot's arrays, in order."""
    return tuple((layer.layer, head) for layer in layers_of(stored) for head in layer.heads)


SCALARS: Final = ("loss", "grad_norm", "learning_rate", "step_seconds", "agent_seconds")
ARRAYS: Final = ("states", *PER_HEAD)
"""Positions are stored: append, never reorder."""
_DTYPES: Final = ("<i8", "<f8", "<f4", "<i4")
Arrays = dict[str, npt.NDArray[Any]]


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Return the columns of a sample, except those that identify it. A NaN scalar becomes a bit of `nan_columns`.

    The arrays are concatenated: name, dtype and shape in a few bytes, then the raw values.
    """
    parts: list[bytes] = []
    for position, name in enumerate(ARRAYS):
        array = getattr(sample, name)
        if array is not None:
            shape: tuple[int, ...] = array.shape
            parts.append(struct.pack(f"<BBB{len(shape)}I", position, _DTYPES.index(array.dtype), len(shape), *shape))
            parts.append(array.raw)  # stored as received: little-endian, in C order
    scalars = {name: getattr(sample, name) for name in SCALARS}
    nan = [value is not None and math.isnan(value) for value in scalars.values()]
    return {
        "step": sample.step,
        "since_step": sample.since_step,
        "arrays": b"".join(parts) or None,
        "nan_columns": sum(1 << position for position, is_nan in enumerate(nan) if is_nan),
        **{name: None if is_nan else value for (name, value), is_nan in zip(scalars.items(), nan, strict=True)},
    }


def unpack_scalars(row: Any) -> dict[str, float | None]:
    """Return the scalars of a stored row, with NaN restored."""
    return {
        name: math.nan if row.nan_columns >> position & 1 else getattr(row, name)
        for position, name in enumerate(SCALARS)
    }


def unpack_arrays(blob: bytes | None, names: frozenset[str] | None = None) -> Arrays:
    """Return the named arrays (or all) of a blob written by `pack_sample`; an absent array is left out."""
    arrays: Arrays = {}
    at, blob = 0, blob or b""
    while at < len(blob):
        position, dtype, ndim = struct.unpack_from("<BBB", blob, at)
        shape = struct.unpack_from(f"<{ndim}I", blob, at + 3)
        at += 3 + 4 * ndim
        count = math.prod(shape)
        if names is None or ARRAYS[position] in names:
            arrays[ARRAYS[position]] = np.frombuffer(blob, _DTYPES[dtype], count, at).reshape(shape)
        at += count * int(_DTYPES[dtype][2])
    return arrays


def head_arrays(row: Any, heads: int, names: frozenset[str] | None = None) -> Arrays:
    """Return the named arrays (or all) of a stored sample of a boot with `heads` heads: states [heads, SLOT_COUNT], the
    others [heads]. Arrays of another shape are skipped, because their rows cannot be assigned to heads."""
    found: Arrays = {}
    try:
        stored = unpack_arrays(row.arrays, names)
    except (struct.error, ValueError, IndexError) as error:
        passed_over("sample", row.id, error)
        return found
    for name, values in stored.items():
        if name in PER_HEAD and values.shape == (heads,):
            found[name] = values
        elif (
            name == "states"
            and values.dtype == np.int64
            and values.ndim == 2
            and (len(values) == heads and values.shape[1] >= OLDEST_SLOT_COUNT)
        ):
            found[name] = fitted(values)
        else:
            passed_over("sample", row.id, f"{name} is {values.dtype} {values.shape} of a boot with {heads} heads")
    return found


Columns = slice | Sequence[int] | npt.NDArray[np.intp]
_ALL: Final = slice(None)


class Values(NamedTuple):
    """Values of a metric at steps, or over groups of steps, ascending."""

    steps: npt.NDArray[np.int64]
    """[rows]: the step, or the last one of the group."""
    values: npt.NDArray[np.floating[Any]]
    """[rows, 3, columns]: low, high, last; NaN if nothing was counted. A metric of the run or of the worst heads has
    [rows, 4, columns]: the fourth is 1 if NaN was sent, or the number of the worst head."""


def joined(parts: Sequence[Values]) -> Values:
    """Join parts with distinct steps, at least one part, in the order of their steps."""
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps, kind="stable")
    return Values(steps[order], np.concatenate([part.values for part in parts])[order])


def grouped(metric: Metric, found: Values, width: int, first: int = 0) -> Values:
    """Reduce values to groups of `width` steps, counted from step `first`."""
    groups = (found.steps - first) // width
    begins = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(groups) else np.empty(0, dtype=np.intp)
    if len(begins) == len(groups):
        return found
    low, high, last, *mark = np.moveaxis(found.values, 1, 0)
    parts = [np.fmin.reduceat(low, begins), np.fmax.reduceat(high, begins), _last_of(last, ~np.isnan(last), begins)]
    if mark:
        size = mark[0] if metric.head is None else np.fmax(metric.badness(low), metric.badness(high))
        parts.append(_last_of(mark[0], _are_largest(size, begins), begins))
    return Values(found.steps[np.r_[begins[1:], len(groups)] - 1], np.stack(parts, axis=1))


def _are_largest(size: Any, begins: Sequence[int] | npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    counts = np.diff([*begins, len(size)])
    largest: npt.NDArray[np.bool_] = size == np.repeat(np.fmax.reduceat(size, begins), counts, axis=0)
    return largest


def _last_of(values: Any, wanted: npt.NDArray[np.bool_], begins: Sequence[int] | npt.NDArray[np.intp]) -> Any:
    """Return the last wanted value in each group of rows and each column; NaN if there is none."""
    at = np.maximum.reduceat(np.where(wanted, np.arange(len(values))[:, None], -1), begins, axis=0)
    return np.where(at < 0, np.nan, np.take_along_axis(values, at, axis=0))


RUN_SCALARS: Final[dict[str, str]] = {m.key: m.sample for m in METRICS if m.sample}
"""Names of the scalars of a sample, by the catalogue key of their run-level metric."""
SERIES_KEYS: Final = tuple(m.key for m in METRICS if m.has_series and not m.head)
"""Run-level metrics that have a series."""
_FIELDS: Final[dict[str, Metric]] = {m.head.field: m for m in HEAD_METRICS if m.head is not None and m.head.field}
_ACROSS_RANKS: Final[dict[str, AcrossRanks]] = {m.sample: m.across_ranks for m in METRICS if m.sample}
_REDUCE: Final[dict[AcrossRanks, Callable[[Sequence[float]], Any]]] = {"mean": np.mean, "max": np.max, "min": np.min}
_HEADS_AT_ONCE: Final = 2**18
"""Heads times steps that are read at once, some 100 MiB."""
NOTHING_SEEN: Final = identity_row()


@dataclass(frozen=True)
class Axis:
    """The heads of a run, all ranks and boots together, in the order (layer, head)."""

    heads: tuple[HeadRef, ...]
    rows: dict[str, npt.NDArray[np.intp]]
    """For each topology, by its hash: the positions on this axis of the array rows of its boots."""

    @cached_property
    def columns(self) -> dict[int, slice]:
        """The positions of each layer's heads, layers ascending."""
        layers = np.array([layer for layer, _ in self.heads], dtype=np.int64)
        found, first, count = np.unique(layers, return_index=True, return_counts=True)
        return {int(n): slice(int(at), int(at + size)) for n, at, size in zip(found, first, count, strict=True)}

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The number of each head within its layer."""
        return np.array([head for _, head in self.heads], dtype=np.int64)

    @cached_property
    def layers(self) -> list[int]:
        """The layers, ascending."""
        return list(self.columns)


def axis_of(connection: Connection, run_id: int) -> Axis:
    """Return the heads of a run."""
    return axes_of(connection, [run_id])[run_id]


def axes_of(connection: Connection, run_ids: Collection[int]) -> dict[int, Axis]:
    """Return the heads of each of these runs."""
    own = select(boots.c.run_id, boots.c.topology).where(boots.c.run_id.in_(run_ids)).distinct().subquery()
    query = select(own.c.run_id, topologies).join(topologies, own.c.topology == topologies.c.hash)
    known: dict[int, dict[str, str]] = {run_id: {} for run_id in run_ids}
    for row in connection.execute(query):
        known[row.run_id][row.hash] = row.layers
    return {run_id: _axis(frozenset(layers.items())) for run_id, layers in known.items()}


@lru_cache(maxsize=64)
def _axis(layers: frozenset[tuple[str, str]]) -> Axis:
    """Return the heads of some topologies, by hash, together; cached, because many runs have the same topologies."""
    refs = {digest: heads_of_layers(stored) for digest, stored in layers}
    heads = tuple(sorted({ref for known in refs.values() for ref in known}))
    index = {ref: i for i, ref in enumerate(heads)}
    return Axis(heads, {digest: np.array([index[ref] for ref in own], dtype=np.intp) for digest, own in refs.items()})


LIVE_SAMPLES: Final[Select[Any]] = (
    select(samples, boots.c.rank, boots.c.boot, boots.c.topology)
    .join(boots, samples.c.boot_id == boots.c.id)
    .where(or_(boots.c.until_step.is_(None), samples.c.step <= boots.c.until_step))
    .order_by(samples.c.step, boots.c.rank, boots.c.boot, samples.c.sequence, samples.c.position)
)
"""Samples that no later boot of the same rank has superseded, in the fixed order."""


_STEP: Final = attrgetter("step")


@dataclass
class MergedSteps:
    """Some steps of a run, ranks merged. Heads are in the order of the axis; NaN if nothing was counted."""

    steps: npt.NDArray[np.int64]
    """[steps], ascending."""
    words: npt.NDArray[np.int64]
    """[steps, heads, SLOT_COUNT]."""
    counted: npt.NDArray[np.bool_]
    """[steps, heads]: whether a rank sent this head's state words."""
    fields: dict[str, Floats]
    """[steps, heads] each: modes, spectral norms, risk."""
    scalars: list[dict[str, float | None]]
    """[steps]: run-level numbers; None if no rank sent one, NaN if a rank sent NaN."""

    def head_values(self, metric: Metric, heads: Columns = _ALL) -> Floats:
        """Return a per-head metric, [steps, heads]. Raises ValueError for another metric."""
        if metric.head is None:
            raise ValueError(f"{metric.key} is not a per-head metric")
        if metric.head.read is None:
            return self.fields[metric.head.field or ""][:, heads]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return np.where(self.counted[:, heads], metric.head.read(self.words[:, heads]), np.nan)

    def run_values(self, key: str) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return a run-level metric, [steps], and a mask of the steps for which it was sent."""
        if of := BY_KEY[key].worst_of:
            worst = np.fmax.reduce(BY_KEY[of].badness(self.head_values(BY_KEY[of])), axis=1, initial=np.nan)
            return worst, ~np.isnan(worst)
        found = [numbers[RUN_SCALARS[key]] for numbers in self.scalars]
        return np.array(found, dtype=np.float64), np.array([value is not None for value in found])

    def values_of(self, metric: Metric, heads: Columns = _ALL) -> Values:
        """Return a metric of the run, or of these heads."""
        if metric.head is not None:
            return Values(self.steps, np.stack([self.head_values(metric, heads)] * 3, axis=1))
        values, given = self.run_values(metric.key)
        return Values(self.steps, np.stack([values] * 3 + [given & np.isnan(values)], axis=1)[:, :, None])

    def worst_of(self, metric: Metric, axis: Axis, layers: Iterable[int]) -> Values:
        """Return a metric of the worst head of each of these layers."""
        heads = [np.arange(len(axis.heads))[axis.columns[layer]] for layer in layers]
        picked, begins = np.concatenate(heads), np.cumsum([0, *map(len, heads)])[:-1]
        values = self.head_values(metric, picked).T
        worst = _are_largest(metric.badness(values), begins)
        numbers = np.broadcast_to(axis.numbers[picked][:, None], values.shape)
        low, mark = _last_of(values, worst, begins).T, _last_of(numbers, worst, begins).T
        return Values(self.steps, np.stack([low, low, low, mark], axis=1))

    def latest(self) -> dict[str, float | None]:
        """Return the run-level metrics of the last step, by catalogue key."""
        found = {}
        for key in SERIES_KEYS:
            values, given = self.run_values(key)
            found[key] = float(values[-1]) if given[-1] else None
        return found


def merge(axis: Axis, rows: Sequence[Row[Any]], names: frozenset[str] | None = None) -> MergedSteps:
    """Merge samples, given in the fixed order. `names`: the arrays to read; None for all."""
    return _merged(axis, groupby(rows, key=_STEP), len({row.step for row in rows}), names)


def _merged(
    axis: Axis, by_step: Iterator[tuple[int, Iterator[Row[Any]]]], most: int, names: frozenset[str] | None
) -> MergedSteps:
    """Merge at most `most` further steps. Rows are released once merged, because a step has one row of each rank."""
    shape = most, len(axis.heads)
    words = np.empty((*shape, SLOT_COUNT if names is None or "states" in names else 0), np.int64)
    counted = np.zeros(shape, dtype=np.bool_)
    of_heads = [name for name in _FIELDS if names is None or name in names]
    fields = dict(zip(of_heads, np.full((len(of_heads), *shape), np.nan), strict=True))
    places: dict[str, Columns] = {}
    steps: list[int] = []
    scalars: list[dict[str, float | None]] = []
    for i, (step, group) in enumerate(islice(by_step, most)):
        seen = False
        parts: list[dict[str, float | None]] = []
        for row in group:
            parts.append(unpack_scalars(row))
            where = axis.rows.get(row.topology)
            if where is None or names == frozenset():
                continue
            if row.topology not in places:
                whole = np.array_equal(where, np.arange(len(axis.heads)))
                places[row.topology] = _ALL if whole else where  # indexing by a slice does not copy
            at = places[row.topology]
            for name, values in head_arrays(row, len(where), names).items():
                if name == "states":
                    if not seen and at is not _ALL:
                        words[i] = NOTHING_SEEN
                    seen = True
                    known = counted[i, at].any()
                    words[i, at] = merge_words([words[i, at], values]) if known else values
                    counted[i, at] = True
                elif len(parts) == 1:  # the first rank of this step; merging with NaN below would give the same
                    fields[name][i, at] = values
                else:
                    pick = np.fmin if _FIELDS[name].across_ranks == "min" else np.fmax
                    old = fields[name][i, at]
                    fields[name][i, at] = pick(old, values.astype(np.float64))
        if not seen and words.size:
            words[i] = NOTHING_SEEN
        steps.append(step)
        scalars.append(merge_scalars(parts))
    own = slice(len(steps))
    given = {name: values[own] for name, values in fields.items()}
    return MergedSteps(np.array(steps, dtype=np.int64), words[own], counted[own], given, scalars)


def merge_scalars(parts: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Merge run-level numbers of the ranks as the catalogue says, by default to the largest; NaN stays NaN."""
    merged: dict[str, float | None] = {}
    for name in SCALARS:
        values = [value for part in parts if (value := part[name]) is not None]
        if not values:
            merged[name] = None
        elif len(values) == 1:
            merged[name] = values[0]
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                merged[name] = float(_REDUCE[_ACROSS_RANKS.get(name, "max")](values))
    return merged


Newest = tuple[Axis, list[Row[Any]]]
"""The heads of a run and the samples of its newest reading."""
_STEPS_LOOKED_AT: Final = 16


def newest_samples(connection: Connection, run_ids: Collection[int]) -> dict[int, Newest]:
    """Return, for each run with samples, its heads and the samples of its newest reading, in three queries.

    The newest reading is the newest of the last few steps that the most ranks of the newest generation have reported.
    """
    live = LIVE_SAMPLES.order_by(None)
    steps = live.with_only_columns(samples.c.step).where(samples.c.run_id == runs.c.id).group_by(samples.c.step)
    nth = steps.order_by(desc(samples.c.step)).offset(_STEPS_LOOKED_AT - 1).limit(1).correlate(runs).scalar_subquery()
    lately = select(runs.c.id, func.coalesce(nth, 0).label("first")).where(runs.c.id.in_(run_ids)).cte()
    living = func.count(func.distinct(case((boots.c.newest, boots.c.rank))))
    ranks = func.count(func.distinct(boots.c.rank))
    order = desc(living), desc(ranks), desc(samples.c.step)
    place = func.row_number().over(partition_by=samples.c.run_id, order_by=order)
    placed = live.with_only_columns(samples.c.run_id, samples.c.step, place.label("place"))
    placed = placed.join(lately, and_(samples.c.run_id == lately.c.id, samples.c.step >= lately.c.first))
    newest = placed.group_by(samples.c.run_id, samples.c.step).cte()
    same = and_(samples.c.run_id == newest.c.run_id, samples.c.step == newest.c.step, newest.c.place == 1)
    rows: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(LIVE_SAMPLES.join(newest, same)):
        rows[row.run_id].append(row)
    axes = axes_of(connection, rows.keys())
    return {run_id: (axes[run_id], own) for run_id, own in rows.items()}


def merged_steps(
    connection: Connection, axis: Axis, query: Select[Any], names: frozenset[str] | None = None
) -> Iterator[MergedSteps]:
    """Merge the rows of a query in the fixed order, some steps at a time, to limit the memory of long, wide runs."""
    at_once = max(1, min(64, _HEADS_AT_ONCE // max(1, len(axis.heads))))
    with connection.execute(query.execution_options(yield_per=at_once)) as rows:
        by_step = groupby(rows, key=_STEP)
        while len((some := _merged(axis, by_step, at_once, names)).steps):
            yield some
            give_up_if_cancelled(connection)


def arrays_of(metric: Metric) -> frozenset[str]:
    """Return the names of the arrays of a sample that a metric needs."""
    if metric.head is None:
        return arrays_of(BY_KEY[metric.worst_of]) if metric.worst_of else frozenset()
    return frozenset({metric.head.field or "states"})


SPAN: Final = 1024
BUCKET: Final = 128
ROLLING_SECONDS: Final = 2.0
_CHANGED: Final = text(
    "INSERT INTO rollup_spans (run_id, span, changed, built) VALUES (:run_id, :span, 1, 0) "
    "ON CONFLICT (run_id, span) DO UPDATE SET changed = rollup_spans.changed + 1"
)
WHOLE: Final = -1
"""Used as the layer of a metric of the run, or of the worst heads of all layers."""
_DRAWN: Final = (*HEAD_METRICS, *(BY_KEY[key] for key in SERIES_KEYS))


def _buckets_of(layer: int, columns: int) -> np.dtype[np.void]:
    """Return the dtype of the non-empty buckets in a row; their steps are relative to the first step of the span."""
    return np.dtype([("step", "<i2"), ("values", "<f4", (4 if layer == WHOLE else 3, columns))])


class Roller:
    """Builds the roll-ups of spans that their runs have passed, once the spans no longer change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[tuple[int, int], int] = {}
        """Change counters of the spans that were due at the last call."""

    async def build_due(self, closing: asyncio.Event) -> None:
        """Build every due span that has not changed since the last call, because slow ranks may still send samples."""
        own, later = rollup_spans.c, rollup_spans.alias("later").c
        passed = select(later.span).where(later.run_id == own.run_id, later.span > own.span).exists()
        query = select(own.run_id, own.span, own.changed).where(own.changed != own.built, passed)
        found = await self._store.read(lambda connection: connection.execute(query).all())
        due = {(row.run_id, row.span): row.changed for row in found}
        rested = [key for key, changed in due.items() if self._seen.get(key) == changed]
        self._seen = due
        for run_id, span in rested:
            if closing.is_set():
                return
            await build(self._store, run_id, span)


async def build(store: Store, run_id: int, span: int) -> bool:
    """Build the roll-ups of one span. Return False if it changed meanwhile."""
    steps = samples.c.step.between(span * SPAN, (span + 1) * SPAN - 1)
    same = rollup_spans.c.run_id == run_id, rollup_spans.c.span == span

    def roll(connection: Connection) -> tuple[int | None, Axis, list[dict[str, Any]]]:
        before = connection.execute(select(rollup_spans.c.changed).where(*same)).scalar()
        axis = axis_of(connection, run_id)
        found: dict[tuple[str, bool], list[Values]] = defaultdict(list)
        for some in merged_steps(connection, axis, LIVE_SAMPLES.where(samples.c.run_id == run_id, steps)):
            for metric in _DRAWN:
                found[metric.key, metric.head is None].append(grouped(metric, some.values_of(metric), BUCKET))
                if metric.head is not None and axis.heads:
                    worst = some.worst_of(metric, axis, axis.layers)
                    found[metric.key, True].append(grouped(metric, worst, BUCKET))
        rows = []
        for (key, whole), parts in found.items():
            own = grouped(BY_KEY[key], joined(parts), BUCKET)
            for layer, columns in ((WHOLE, slice(None)),) if whole else axis.columns.items():
                if data := _packed(layer, own, own.values[:, :, columns], span):
                    rows.append({"run_id": run_id, "metric": key, "layer": layer, "span": span, "data": data})
        return before, axis, rows

    before, axis, built = await store.read(roll)

    def keep(connection: Connection) -> bool:
        lock_runs(connection, [run_id])
        unchanged = update(rollup_spans).where(*same, rollup_spans.c.changed == before).values(built=before)
        if not connection.execute(unchanged).rowcount:
            return False
        layers = [*axis.layers, WHOLE]
        own = rollups.c.run_id == run_id, rollups.c.metric.in_([m.key for m in _DRAWN]), rollups.c.layer.in_(layers)
        connection.execute(delete(rollups).where(*own, rollups.c.span == span))  # uses the whole primary key
        if built:
            connection.execute(insert(rollups), built)
        return True

    return await store.write(keep)


def _packed(layer: int, found: Values, values: npt.NDArray[np.floating[Any]], span: int) -> bytes:
    """Pack the buckets in which something was counted or NaN was sent."""
    held = ~np.isnan(values[:, 2]).all(axis=1) | (values[:, 3:] == 1).any(axis=(1, 2))
    row = np.zeros(held.sum(), _buckets_of(layer, values.shape[2]))
    row["step"] = found.steps[held] - span * SPAN
    with np.errstate(over="ignore"):
        row["values"] = values[held]
    return row.tobytes()


def changed_spans(connection: Connection, spans: Iterable[tuple[int, int]]) -> None:
    """Invalidate the roll-ups of these spans, each a (run id, span)."""
    connection.execute(_CHANGED, [{"run_id": run_id, "span": span} for run_id, span in sorted(spans)])


def changed_runs(connection: Connection, run_ids: Collection[int]) -> None:
    """Invalidate all roll-ups of these runs, including those being built."""
    if run_ids:
        own = update(rollup_spans).where(rollup_spans.c.run_id.in_(run_ids))
        connection.execute(own.values(changed=rollup_spans.c.changed + 1))


def built_spans(connection: Connection, run_id: int, first: int, last: int) -> set[int]:
    """Return the spans within steps [first, last] whose roll-ups are valid."""
    query = select(rollup_spans.c.span).where(
        rollup_spans.c.run_id == run_id,
        rollup_spans.c.span.between(-(-first // SPAN), (last + 1) // SPAN - 1),
        rollup_spans.c.changed == rollup_spans.c.built,
    )
    return set(connection.execute(query).scalars())


def rolled_up(
    connection: Connection, run_id: int, metric: str, layer: int, columns: int, spans: Collection[int]
) -> Values:
    """Return the buckets of some built spans. `columns`: number of heads of the layer, of layers of the run, or 1."""
    kind, own = _buckets_of(layer, columns), rollups.c
    place = own.run_id == run_id, own.metric == metric, own.layer == layer
    query = select(own.span, own.data).where(*place, own.span.between(min(spans, default=0), max(spans, default=-1)))
    found = [row for row in connection.execute(query.order_by(own.span)).all() if row.span in spans]
    buckets = np.frombuffer(b"".join(row.data for row in found), kind)
    first = [SPAN * row.span for row in found]
    begins = np.repeat(np.array(first, dtype=np.int64), [len(row.data) // kind.itemsize for row in found])
    return Values(begins + buckets["step"], buckets["values"])
