"""Per-head metrics of many runs as tables: the worst head of each layer, and the worst heads of each run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.metrics.catalog import BY_KEY, HEAD_METRICS
from foreshock.contract.slots import Floats
from foreshock.server.curves.merging import Axis, MergedSteps
from foreshock.server.http.lines import Labels, Line, line

_HEAD_NAMES: Final = tuple(metric.name for metric in HEAD_METRICS)
_LAYER_NAMES: Final = tuple(metric.layer_name for metric in HEAD_METRICS)
_RISK, _SIZE = (HEAD_METRICS.index(BY_KEY[key]) for key in ("head.risk", "head.row_max_abs"))
HEADS_AT_ONCE: Final = 2**15
"""Heads whose tables are made together; numpy takes as long for a run's few as for thousands."""


@dataclass
class Table:
    """Per-head metrics at some places, kept as numbers: of thousands of runs few fit into the budget."""

    names: Sequence[str]
    labels: Sequence[Labels]
    values: Floats
    """[places, names]; NaN where nothing was counted."""
    by_place: bool
    """In which order the lines stand: place by place, or name by name."""

    def __len__(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.values)))

    def __iter__(self) -> Iterator[Line]:
        there = ~np.isnan(self.values)
        where = np.argwhere(there) if self.by_place else np.argwhere(there.T)[:, ::-1]
        for place, name in where.tolist():
            yield line(self.names[name], self.labels[place], float(self.values[place, name]))

    @cached_property
    def lines(self) -> list[Line]:
        """As text, kept from the first scrape on whose budget reaches so far."""
        return list(self)


Reading = tuple[str, Axis, MergedSteps]
"""A run's name, its heads and its newest reading."""


def head_tables(readings: Sequence[Reading], worst_heads: int) -> list[tuple[Table, Table]]:
    """(one row for each layer, one for each of the worst heads) of each run, each of which has heads."""
    values = _values([reading for _, _, reading in readings])
    heads = np.array([len(axis.heads) for _, axis, _ in readings])
    run_of = np.repeat(np.arange(len(readings)), heads)
    worst = _worst_of_layers([own.stop - own.start for _, axis, _ in readings for own in axis.columns.values()], values)
    first = _worst_first(run_of, values[:, _RISK], values[:, _SIZE])
    firsts = np.split(first, np.searchsorted(run_of[first], np.arange(1, len(readings))))
    tables, begin, layers_begin = [], 0, 0
    for (run, axis, _), own in zip(readings, firsts, strict=True):
        rows = worst[layers_begin : layers_begin + len(axis.columns)].copy()  # a view would keep the others' alive
        layers = Table(_LAYER_NAMES, [(run, str(layer)) for layer in axis.columns], rows, by_place=False)
        some = own[:worst_heads]
        labels = [(run, str(axis.heads[i][0]), str(axis.heads[i][1])) for i in (some - begin).tolist()]
        tables.append((layers, Table(_HEAD_NAMES, labels, values[some], by_place=True)))
        begin, layers_begin = begin + len(axis.heads), layers_begin + len(axis.columns)
    return tables


def _values(readings: Sequence[MergedSteps]) -> Floats:
    """[heads of all runs, metrics]: each metric of each head in the last step."""
    last = MergedSteps(
        np.zeros(1, np.int64),
        np.concatenate([reading.words[-1:] for reading in readings], axis=1),
        np.concatenate([reading.counted[-1:] for reading in readings], axis=1),
        {name: np.concatenate([r.fields[name][-1:] for r in readings], axis=1) for name in readings[0].fields},
        {},
        {},
    )
    return np.stack([last.head_values(metric)[0] for metric in HEAD_METRICS], axis=1)


def _worst_of_layers(heads: Sequence[int], values: Floats) -> Floats:
    """[layers, metrics]: the value of each layer's worst head, the first of several; NaN where no head has one.

    heads: how many each layer has, at least one; they stand together.
    """
    starts = np.cumsum([0, *heads[:-1]])
    there = ~np.isnan(values)
    bad = np.stack([metric.badness(values[:, i]) for i, metric in enumerate(HEAD_METRICS)], axis=1)
    size = np.where(there, bad, -np.inf)
    layer = np.repeat(np.arange(len(heads)), heads)
    # a value of -inf is worse than none
    worst = (size == np.maximum.reduceat(size, starts)[layer]) & (there | ~np.logical_or.reduceat(there, starts)[layer])
    place = np.where(worst, np.arange(len(values))[:, np.newaxis], len(values))
    found: Floats = np.take_along_axis(values, np.minimum.reduceat(place, starts), axis=0)
    return found


def _worst_first(run: npt.NDArray[np.intp], risk: Floats, size: Floats) -> npt.NDArray[np.intp]:
    """Heads by run, then by risk, by their largest |row maximum|, by number; those with neither are left out."""
    order: npt.NDArray[np.intp] = np.lexsort((-np.nan_to_num(size, nan=-1.0), -np.nan_to_num(risk, nan=-1.0), run))
    measured: npt.NDArray[np.intp] = order[~(np.isnan(risk) & np.isnan(size))[order]]
    return measured
