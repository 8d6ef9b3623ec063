"""From the ranks' samples of one step to one reading per head of the run.

Ranks merge in the fixed order (rank, boot, sequence), so the same samples always give the same bits. A head that a rank
does not hold, or that no rank counted, has no value: it is never taken as zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Row, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.catalog import HEAD_METRICS, Floats, Metric
from foreshock.contract.slots import SLOT_COUNT, identity_row, merge_words
from foreshock.contract.wire import HeadRef
from foreshock.server.commands import heads_of_layers
from foreshock.server.packing import SCALARS, unpack_arrays, unpack_scalars
from foreshock.server.schema import boots, samples, topologies

RUN_SCALARS = {
    "run.loss": "loss",
    "run.grad_norm": "grad_norm",
    "run.learning_rate": "learning_rate",
    "run.step_time": "step_seconds",
    "run.agent_time": "agent_seconds",
}
"""Run-level metrics that a sample carries, by catalogue key. run.worst_risk comes from the heads."""
SERIES_KEYS = (*RUN_SCALARS, "run.worst_risk")


@dataclass(frozen=True)
class Axis:
    """The heads of a run, all ranks and boots together, in the order (layer, head)."""

    heads: tuple[HeadRef, ...]
    rows: dict[int, npt.NDArray[np.intp]]
    """For each boot that said what it watches: where its array rows stand on this axis."""

    @property
    def layers(self) -> list[int]:
        """The layers, ascending."""
        return sorted({layer for layer, _ in self.heads})

    def index(self) -> dict[HeadRef, int]:
        """Where each head stands."""
        return {ref: i for i, ref in enumerate(self.heads)}


async def axis_of(connection: AsyncConnection, run_id: int) -> Axis:
    """The heads of a run."""
    query = select(boots.c.id, boots.c.topology).where(boots.c.run_id == run_id, boots.c.topology.is_not(None))
    by_boot = {row.id: row.topology for row in await connection.execute(query)}
    found = await connection.execute(select(topologies).where(topologies.c.hash.in_(set(by_boot.values()))))
    refs = {row.hash: heads_of_layers(row.layers) for row in found}
    heads = tuple(sorted({ref for known in refs.values() for ref in known}))
    index = {ref: i for i, ref in enumerate(heads)}
    rows = {digest: np.array([index[ref] for ref in known], dtype=np.intp) for digest, known in refs.items()}
    return Axis(heads, {boot: rows[digest] for boot, digest in by_boot.items()})


@dataclass
class Reading:
    """One step of a run, ranks merged. Arrays stand in the order of the axis, [heads]; NaN where nothing counted."""

    step: int
    words: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]
    fields: dict[str, Floats]
    scalars: dict[str, float | None]

    def head_values(self, metric: Metric) -> Floats:
        """A per-head metric, [heads]. Raises ValueError for another metric."""
        if metric.head is None:
            raise ValueError(f"{metric.key} is not a per-head metric")
        if metric.head.read is None:
            return self.fields[metric.head.field or ""]
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(self.counted, metric.head.read(self.words), np.nan)

    def latest(self) -> dict[str, float | None]:
        """The run-level metrics by catalogue key."""
        values = {key: self.scalars[name] for key, name in RUN_SCALARS.items()}
        risk = self.fields["risk"]
        known = risk[~np.isnan(risk)]
        return {**values, "run.worst_risk": float(known.max()) if known.size else None}


LIVE_SAMPLES = (
    select(samples, boots.c.rank, boots.c.boot)
    .join(boots, samples.c.boot_id == boots.c.id)
    .where(or_(boots.c.until_step.is_(None), samples.c.step <= boots.c.until_step))
    .order_by(samples.c.step, boots.c.rank, boots.c.boot, samples.c.sequence, samples.c.position)
)
"""Samples that no later boot of the same rank has superseded, in the fixed order."""

_FIELDS: tuple[str, ...] = tuple(m.head.field for m in HEAD_METRICS if m.head is not None and m.head.field is not None)


def merge(axis: Axis, step: int, rows: Sequence[Row[Any]], names: frozenset[str] | None = None) -> Reading:
    """Merge the samples of one step, given in the fixed order. `names` limits which arrays are read."""
    count = len(axis.heads)
    words = np.tile(identity_row(), (count, 1)) if count else np.empty((0, SLOT_COUNT), dtype=np.int64)
    counted = np.zeros(count, dtype=np.bool_)
    fields: dict[str, Floats] = {name: np.full(count, np.nan) for name in _FIELDS}
    for row in rows:
        where = axis.rows.get(row.boot_id)
        if where is None:
            continue
        arrays = unpack_arrays(row.arrays) if names is None else unpack_arrays(row.arrays, names)
        for name, values in arrays.items():
            if values.shape[:1] != where.shape:
                continue  # not as many heads as the boot said it watches: cannot be told apart
            if name == "states":
                words[where] = merge_words([words[where], values])
                counted[where] = True
            else:
                pick = np.fmin if name == "modes" else np.fmax  # a mode is on when every rank has it
                fields[name][where] = pick(fields[name][where], values.reshape(len(where)).astype(np.float64))
    return Reading(step, words, counted, fields, merge_scalars([unpack_scalars(row) for row in rows]))


def merge_scalars(parts: Iterable[dict[str, float | None]]) -> dict[str, float | None]:
    """Run-level numbers of the ranks: the mean loss and learning rate, of the others the largest; NaN stays NaN."""
    parts = list(parts)
    merged: dict[str, float | None] = {}
    for name in SCALARS:
        values = [value for part in parts if (value := part[name]) is not None]
        if not values:
            merged[name] = None
        elif any(math.isnan(value) for value in values):
            merged[name] = math.nan
        elif name in ("loss", "learning_rate"):
            total = sum(values) if math.isfinite(max(map(abs, values))) else float(np.sum(values))
            merged[name] = total / len(values)
        else:
            merged[name] = max(values)
    return merged
