"""Readings: samples of a run's ranks merged to one reading per step and head, and such steps rolled up.

Ranks merge in the fixed order (rank, boot, sequence), so the same samples always give the same bits. A head that a rank
does not hold, or that no rank counted, has no value: it is never taken as zero.

Roll-ups hold every metric over buckets of 128 and of 1024 steps, so that a run of months is drawn in a moment. They are
built span by span of 1024 steps, and lie by layer: one head's curve does not read the heads of other layers. A roll-up
is nothing but a memory of its samples. Ingest counts the changes of each span; a span that the run has passed is built
in the background, and what has changed since is read from the samples themselves.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, Select, bindparam, delete, insert, or_, select, text, update

from foreshock.contract.metrics.catalog import BY_KEY, METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import AcrossRanks, Metric
from foreshock.contract.slots import SLOT_COUNT, Floats, identity_row, merge_words
from foreshock.contract.wire import HeadRef
from foreshock.server.store.database import ClosingError, Store, give_up_if_cancelled, lock_runs, log_store_error, pause
from foreshock.server.store.reading import SCALARS, head_arrays, heads_of_layers, unpack_scalars
from foreshock.server.store.schema import boots, rollup_spans, rollups, samples, topologies


@dataclass
class Spans:
    """Values over spans of `width` steps from `first` on, [spans, columns] each; NaN where nothing counted."""

    first: int
    width: int
    steps: npt.NDArray[np.int64]
    """[spans]: the last step seen in each; -1 in an empty one."""
    low: Floats
    high: Floats
    last: Floats
    bad: npt.NDArray[np.bool_]
    """[spans]: a run-level value was sent and was NaN."""

    @classmethod
    def over(cls, first: int, last: int, width: int, columns: int) -> Self:
        """Empty spans from step `first` to step `last`."""
        size = (last - first) // width + 1
        low, high, final = (np.full((size, columns), np.nan) for _ in range(3))
        return cls(first, width, np.full(size, -1), low, high, final, np.zeros(size, dtype=np.bool_))

    @classmethod
    def for_points(cls, first: int, last: int, points: int, columns: int) -> Self:
        """At most `points` empty spans from step `first` to step `last`."""
        return cls.over(first, last, max(1, math.ceil((last - first + 1) / points)), columns)

    def add(
        self,
        steps: npt.NDArray[np.int64],
        low: Floats,
        high: Floats,
        last: Floats,
        bad: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Take in values at ascending steps, [steps, columns] each; spans may be filled in any order."""
        spans = (steps - self.first) // self.width
        edges = np.flatnonzero(np.r_[True, spans[1:] != spans[:-1]]) if len(spans) else np.empty(0, dtype=np.intp)
        if not len(edges):
            return
        at = spans[edges]
        self.low[at] = np.fmin(self.low[at], np.fmin.reduceat(low, edges, axis=0))
        self.high[at] = np.fmax(self.high[at], np.fmax.reduceat(high, edges, axis=0))
        if bad is not None:
            self.bad[at] |= np.logical_or.reduceat(bad, edges)
        newer = (steps >= self.steps[spans])[:, None] & ~np.isnan(last)
        newest = np.maximum.reduceat(np.where(newer, np.arange(len(steps))[:, None], -1), edges, axis=0)
        found = np.take_along_axis(last, np.maximum(newest, 0), axis=0)
        self.last[at] = np.where(newest >= 0, found, self.last[at])  # later steps overwrite where they have a value
        self.steps[at] = np.maximum(self.steps[at], np.maximum.reduceat(steps, edges))


RUN_SCALARS: Final[dict[str, str]] = {m.key: m.sample for m in METRICS if m.sample}
"""Run-level metrics that a sample carries, by catalogue key."""
SERIES_KEYS: Final = tuple(m.key for m in METRICS if m.has_series and not m.head)
"""Run-level metrics that have a series."""
_FIELDS: Final[dict[str, Metric]] = {m.head.field: m for m in HEAD_METRICS if m.head is not None and m.head.field}
_ACROSS_RANKS: Final[dict[str, AcrossRanks]] = {m.sample: m.across_ranks for m in METRICS if m.sample}
_REDUCE: Final[dict[AcrossRanks, Callable[[Sequence[float]], Any]]] = {"mean": np.mean, "max": np.max, "min": np.min}
_STEPS_AT_ONCE: Final = 64
_NOTHING_SEEN: Final = identity_row()
ARRAYS_OF_MODES: Final = frozenset({"modes"})
"""For `merge`, where nothing but the heads' modes is wanted."""


@dataclass(frozen=True)
class Axis:
    """The heads of a run, all ranks and boots together, in the order (layer, head)."""

    heads: tuple[HeadRef, ...]
    rows: dict[str, npt.NDArray[np.intp]]
    """For each topology, by its hash: where the array rows of its boots stand on this axis; -1 for those left out."""

    @cached_property
    def columns(self) -> dict[int, slice]:
        """Where the heads of each layer stand, layers ascending."""
        return _columns(self.heads)

    @property
    def layers(self) -> list[int]:
        """The layers, ascending."""
        return list(self.columns)

    def index(self) -> dict[HeadRef, int]:
        """Where each head stands."""
        return {ref: i for i, ref in enumerate(self.heads)}

    def only(self, picked: npt.NDArray[np.intp]) -> "Axis":
        """The axis of some of its heads, given by where they stand, ascending."""
        place = np.full(len(self.heads), -1, dtype=np.intp)
        place[picked] = np.arange(len(picked))
        return Axis(tuple(self.heads[i] for i in picked), {digest: place[where] for digest, where in self.rows.items()})


@lru_cache(maxsize=64)
def _columns(heads: tuple[HeadRef, ...]) -> dict[int, slice]:
    layers = np.array([layer for layer, _ in heads], dtype=np.int64)
    found, first, count = np.unique(layers, return_index=True, return_counts=True)
    return {int(n): slice(int(at), int(at + size)) for n, at, size in zip(found, first, count, strict=True)}


def axis_of(connection: Connection, run_id: int) -> Axis:
    """The heads of a run."""
    return axes_of(connection, [run_id])[run_id]


def axes_of(connection: Connection, run_ids: Collection[int]) -> dict[int, Axis]:
    """The heads of each of these runs, in two queries."""
    query = select(boots.c.run_id, boots.c.topology).distinct()
    known = connection.execute(query.where(boots.c.run_id.in_(run_ids), boots.c.topology.is_not(None)))
    by_run: dict[int, set[str]] = {run_id: set() for run_id in run_ids}
    for row in known:
        by_run[row.run_id].add(row.topology)
    hashes = set().union(*by_run.values())
    found = connection.execute(select(topologies).where(topologies.c.hash.in_(hashes)))
    refs = {row.hash: heads_of_layers(row.layers) for row in found}
    shared: dict[frozenset[str], _Places] = {}  # of a fleet of runs most have the same heads
    axes = {}
    for run_id, own in by_run.items():
        key = frozenset(own)
        if key not in shared:
            shared[key] = _places({digest: refs[digest] for digest in key})
        axes[run_id] = Axis(*shared[key])
    return axes


_Places = tuple[tuple[HeadRef, ...], dict[str, npt.NDArray[np.intp]]]
"""The heads of some topologies together, and where the rows of each stand."""


def _places(refs: dict[str, tuple[HeadRef, ...]]) -> _Places:
    heads = tuple(sorted({ref for known in refs.values() for ref in known}))
    index = {ref: i for i, ref in enumerate(heads)}
    return heads, {digest: np.array([index[ref] for ref in known], dtype=np.intp) for digest, known in refs.items()}


LIVE_SAMPLES: Final[Select[Any]] = (
    select(samples, boots.c.rank, boots.c.boot, boots.c.topology)
    .join(boots, samples.c.boot_id == boots.c.id)
    .where(or_(boots.c.until_step.is_(None), samples.c.step <= boots.c.until_step))
    .order_by(samples.c.step, boots.c.rank, boots.c.boot, samples.c.sequence, samples.c.position)
)
"""Samples that no later boot of the same rank has superseded, in the fixed order."""


@dataclass
class MergedSteps:
    """Some steps of a run, ranks merged. Heads stand in the order of the axis; NaN where nothing was counted."""

    steps: npt.NDArray[np.int64]
    """[steps], ascending."""
    words: npt.NDArray[np.int64]
    """[steps, heads, SLOT_COUNT]."""
    counted: npt.NDArray[np.bool_]
    """[steps, heads]: some rank sent this head's words."""
    fields: dict[str, Floats]
    """[steps, heads] each: modes, spectral norms, risk."""
    scalars: dict[str, Floats]
    """[steps] each: run-level numbers."""
    given: dict[str, npt.NDArray[np.bool_]]
    """[steps] each: some rank sent this number; tells a NaN loss from none."""

    def head_values(self, metric: Metric) -> Floats:
        """A per-head metric, [steps, heads]. Raises ValueError for another metric."""
        if metric.head is None:
            raise ValueError(f"{metric.key} is not a per-head metric")
        if metric.head.read is None:
            return self.fields[metric.head.field or ""]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return np.where(self.counted, metric.head.read(self.words), np.nan)

    def run_values(self, key: str) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """A run-level metric, [steps], and where it was sent."""
        if of := BY_KEY[key].worst_of:
            worst = np.fmax.reduce(BY_KEY[of].badness(self.head_values(BY_KEY[of])), axis=1, initial=np.nan)
            return worst, ~np.isnan(worst)
        name = RUN_SCALARS[key]
        return self.scalars[name], self.given[name]

    def latest(self) -> dict[str, float | None]:
        """The run-level metrics of the last step, by catalogue key."""
        found = {}
        for key in SERIES_KEYS:
            values, given = self.run_values(key)
            found[key] = float(values[-1]) if given[-1] else None
        return found


def merge(axis: Axis, rows: Sequence[Row[Any]], names: frozenset[str] | None = None) -> MergedSteps:
    """Merge samples given in the fixed order. `names` limits which arrays, and so metrics, are read."""
    by_step = [(step, list(group)) for step, group in groupby(rows, key=lambda row: row.step)]
    shape = len(by_step), len(axis.heads)
    words = np.empty((*shape, SLOT_COUNT if names is None or "states" in names else 0), np.int64)
    counted = np.zeros(shape, dtype=np.bool_)
    of_heads = [name for name in _FIELDS if names is None or name in names]
    fields = dict(zip(of_heads, np.full((len(of_heads), *shape), np.nan), strict=True))
    places: dict[str, tuple[_Place, _Place]] = {}
    scalars = dict(zip(SCALARS, np.full((len(SCALARS), len(by_step)), np.nan), strict=True))
    given = dict(zip(SCALARS, np.zeros((len(SCALARS), len(by_step)), dtype=np.bool_), strict=True))
    for i, (_, group) in enumerate(by_step):
        seen = False
        for row in group:
            where = axis.rows.get(row.topology)
            if where is None or names == frozenset():
                continue
            if row.topology not in places:
                places[row.topology] = _places_on(axis, where)
            own, at = places[row.topology]
            for name, values in head_arrays(row, len(where), names).items():
                values = values[own]
                if name == "states":
                    if not seen and at is not _ALL:
                        words[i] = _NOTHING_SEEN
                    seen = True
                    known = counted[i, at].any()
                    words[i, at] = merge_words([words[i, at], values]) if known else values
                    counted[i, at] = True
                elif row is group[0]:  # as below, where no rank's value has come yet
                    fields[name][i, at] = values
                else:
                    pick = np.fmin if _FIELDS[name].across_ranks == "min" else np.fmax
                    old = fields[name][i, at]
                    fields[name][i, at] = pick(old, values.astype(np.float64))
        if not seen and words.size:
            words[i] = _NOTHING_SEEN
        for name, value in merge_scalars([unpack_scalars(row) for row in group]).items():
            if value is not None:
                scalars[name][i], given[name][i] = value, True
    return MergedSteps(np.array([step for step, _ in by_step], dtype=np.int64), words, counted, fields, scalars, given)


_Place = slice | npt.NDArray[np.intp]
_ALL: Final = slice(None)


def _places_on(axis: Axis, where: npt.NDArray[np.intp]) -> tuple[_Place, _Place]:
    """Which rows of a boot's arrays are on the axis, and where; all in their order take no copies."""
    if len(where) == len(axis.heads) and np.array_equal(where, np.arange(len(where))):
        return _ALL, _ALL
    own = np.flatnonzero(where >= 0)
    return own, where[own]


def merge_scalars(parts: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Run-level numbers of the ranks, each as the catalogue says, the largest without a word of it; NaN stays NaN."""
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


@contextmanager
def stream_chunks(connection: Connection, query: Select[Any]) -> Iterator[Iterator[list[Row[Any]]]]:
    """Rows of a query in the fixed order, some whole steps at a time: a long run of a wide model fits into memory."""
    with connection.execute(query.execution_options(yield_per=_STEPS_AT_ONCE)) as rows:
        yield _chunks(connection, rows)


def _chunks(connection: Connection, rows: Iterable[Row[Any]]) -> Iterator[list[Row[Any]]]:
    steps = groupby(rows, key=lambda row: row.step)
    while chunk := [row for _, step in islice(steps, _STEPS_AT_ONCE) for row in step]:
        give_up_if_cancelled(connection)
        yield chunk


def arrays_of(metric: Metric) -> frozenset[str]:
    """Which arrays of a sample a metric needs."""
    if metric.head is None:
        return arrays_of(BY_KEY[metric.worst_of]) if metric.worst_of else frozenset()
    return frozenset({metric.head.field or "states"})


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
    found: dict[tuple[str, int], dict[int, tuple[int, bytes]]] = defaultdict(dict)
    for own in sorted({width, COARSE}, reverse=True):  # finer buckets take the place of the coarse one
        query = select(rollups.c.metric, rollups.c.layer, rollups.c.span, rollups.c.data).where(
            rollups.c.run_id == run_id,
            rollups.c.width == own,
            rollups.c.metric.in_(metrics),
            rollups.c.layer.in_(layers),
            rollups.c.span.between(min(spans), max(spans)),
        )
        in_order = query.order_by(rollups.c.metric, rollups.c.layer, rollups.c.span)
        for place, rows in groupby(connection.execute(in_order), key=itemgetter(0, 1)):
            found[place] |= {span: (own, data) for _, _, span, data in rows if span in spans}  # others have changed
    sizes = {layer: own.stop - own.start for layer, own in axis.columns.items()} | {RUN_LEVEL: 1}
    return {(metric, layer): _rolled(rows, sizes[layer]) for (metric, layer), rows in found.items() if rows}


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
