"""Adds up the Gram matrices of heads whose inputs are spread over processes, and keeps their norms as one more sample.

Parts wait in the store until a sum is complete, so they may come in any order and to any replica. The norms stand in a
sample of sequence 0, which no batch has, of the boot that sent the first part: they are read, rolled up and superseded
as any other sample's. A sum that stays incomplete expires.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Row, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import Array, Grams, Sample
from foreshock.server.curves.rollups import COARSE, Roller, forget
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, insert_or_ignore
from foreshock.server.store.lanes import ClosingError
from foreshock.server.store.packing import pack_sample, unpack_arrays
from foreshock.server.store.schema import boots, grams, runs, samples, topologies
from foreshock.server.store.topology import heads_of_layers
from foreshock.server.store.trouble import is_away, tell

NORMS: Final = ("query_norm", "key_norm", "query_key_norm")
KEPT_SECONDS: Final = 3600.0
MAX_BYTES: Final = 2**30
"""Most bytes of parts that wait in one run; beyond it the oldest steps go."""
_HEADS_AT_ONCE: Final = 8
_AWAY_SECONDS: Final = 1.0
_WHAT_WAITS: Final = 0, 0
"""In the place of a run and a step, first of all: what was left when the service went down."""
_SEQUENCE: Final = 0
_BOOT: Final = boots.c.id, boots.c.rank, boots.c.boot, boots.c.began, boots.c.replayed


class Part(NamedTuple):
    """What a boot sent."""

    run_id: int
    boot_id: int
    grams: Grams


async def keep_parts(
    store: Store, connection: AsyncConnection, parts: Sequence[Part], started: Collection[int], now: float
) -> set[tuple[int, int]]:
    """Keep new parts; the (run id, step) whose sums may be complete now.

    `started` are boots that have just said what they watch: a sum of theirs may have waited for that alone.
    """
    if parts:
        await connection.execute(insert_or_ignore(store, grams), [_row(part, now) for part in parts])
    for run_id in sorted({part.run_id for part in parts}):
        await _bound(connection, run_id)
    waiting = select(grams.c.run_id, grams.c.step).where(grams.c.boot_id.in_(started)).distinct()
    touched = {(row.run_id, row.step) for row in await connection.execute(waiting)} if started else set()
    return touched | {(part.run_id, part.grams.step) for part in parts}


class Adder:
    """Adds up what is complete, beside the writer: the norms of a wide layer take seconds."""

    def __init__(self, store: Store, roller: Roller) -> None:
        self._store, self._roller = store, roller
        self._due: dict[tuple[int, int], None] = {_WHAT_WAITS: None}
        self._at_work, self._closed = False, False
        self._woken = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether everything that was touched has been looked at."""
        return not self._due and not self._at_work

    def touch(self, steps: Iterable[tuple[int, int]]) -> None:
        """Parts of these (run id, step) were stored, or the heads of their boots became known."""
        self._due |= dict.fromkeys(steps)
        self._woken.set()

    def close(self) -> None:
        """`run` ends soon; parts that are not added up yet stay in the store."""
        self._closed = True
        self._woken.set()

    async def run(self) -> None:
        """Add up until `close`."""
        while not self._closed:
            self._woken.clear()
            if not self._due:
                await self._woken.wait()
                continue
            at = next(iter(self._due))
            del self._due[at]  # before it is looked at: what comes meanwhile is looked at again
            self._at_work = True
            try:
                if at == _WHAT_WAITS:
                    self.touch(await self._store.look(_steps_waiting))
                else:
                    await self._add_up(*at)
            except ClosingError:
                return
            except Exception as error:
                tell("norms could not be added up", error)
                if is_away(error):
                    self._due[at] = None
                    await asyncio.sleep(_AWAY_SECONDS)
            finally:
                self._at_work = False

    async def _add_up(self, run_id: int, step: int) -> None:
        for complete in await self._store.look(partial(_complete, run_id=run_id, step=step)):
            triangles = await self._store.look(partial(_triangles, complete=complete))
            if len(triangles) < len(complete.parts):
                continue  # another replica was first
            norms = await self._norms(triangles, len(complete.heads), complete.parts[0].head_dim)
            if await self._store.transact(partial(self._keep, complete=complete, norms=norms)):
                self._roller.touch(run_id, step)

    async def _norms(self, triangles: Sequence[bytes], heads: int, head_dim: int) -> npt.NDArray[np.float32]:
        """As `spectral_norms`, some heads at a time. Raises ClosingError when the service goes down meanwhile."""
        size = head_dim * (head_dim + 1) // 2 * 4
        key_heads = len(triangles[0]) // size - heads
        group = heads // key_heads
        found = []
        for first in range(0, key_heads, step := max(1, _HEADS_AT_ONCE // group)):
            if self._closed:
                raise ClosingError
            last = min(first + step, key_heads)
            places = (
                slice(first * group * size, last * group * size),
                slice((heads + first) * size, (heads + last) * size),
            )
            some = [part[places[0]] + part[places[1]] for part in triangles]
            found.append(await asyncio.to_thread(spectral_norms, some, (last - first) * group, head_dim))
        return np.concatenate(found, axis=1)

    async def _keep(self, connection: AsyncConnection, complete: "_Complete", norms: npt.NDArray[np.float32]) -> bool:
        """Store the norms in the place of their parts; False when those are gone, with their run or by another."""
        first = complete.parts[0]
        await self._store.lock_runs(connection, [first.run_id])
        query = select(func.count()).select_from(grams).where(complete.own())
        if (await connection.execute(query)).scalar_one() < len(complete.parts):
            return False
        await _store_norms(connection, first, {(first.layer, head): i for i, head in enumerate(complete.heads)}, norms)
        await connection.execute(delete(grams).where(*complete.mine()))
        await forget(connection, {(first.run_id, first.step // COARSE)})
        changed = update(runs).where(runs.c.id == first.run_id).values(changes=runs.c.changes + 1)
        await connection.execute(changed)  # what was made of the run is old
        return True


async def _steps_waiting(connection: AsyncConnection) -> list[tuple[int, int]]:
    found = await connection.execute(select(grams.c.run_id, grams.c.step).distinct())
    return [(row.run_id, row.step) for row in found]


@dataclass(frozen=True)
class _Complete:
    """The parts of a sum that lacks none, in the order of their inputs, without their matrices."""

    parts: list[Row[Any]]
    heads: list[int]

    def mine(self) -> tuple[ColumnElement[bool], ...]:
        """Every part of the same sum, those included that were sent twice."""
        first = self.parts[0]
        return (
            grams.c.run_id == first.run_id,
            grams.c.step == first.step,
            grams.c.layer == first.layer,
            grams.c.began_step == first.began_step,
            grams.c.heads == first.heads,
        )

    def own(self) -> ColumnElement[bool]:
        """These parts."""
        return and_(*self.mine(), grams.c.boot_id.in_([part.boot_id for part in self.parts]))


async def expire(store: Store, now: float) -> None:
    """Forget parts whose others have not come for an hour."""
    old = grams.c.received < now - KEPT_SECONDS
    async with store.write() as connection:
        owners = set((await connection.execute(select(grams.c.run_id).where(old))).scalars())
        await store.lock_runs(connection, owners)
        await connection.execute(delete(grams).where(old, grams.c.run_id.in_(owners)))


def _row(part: Part, now: float) -> dict[str, Any]:
    said = part.grams
    triangles = said.query.numpy().tobytes() + said.key.numpy().tobytes()
    return {
        "run_id": part.run_id,
        "boot_id": part.boot_id,
        "step": said.step,
        "layer": said.layer,
        "began_step": said.began_step,
        "heads": json.dumps(said.heads),
        "head_dim": said.head_dim,
        "first_input": said.inputs[0],
        "end_input": said.inputs[1],
        "all_inputs": said.all_inputs,
        "received": now,
        "size": len(triangles),
        "triangles": triangles,
    }


async def _complete(connection: AsyncConnection, run_id: int, step: int) -> list[_Complete]:
    """The sums of one step that are complete."""
    query = (
        select(*(c for c in grams.c if c.key != "triangles"), topologies.c.layers, *_BOOT)
        .join(boots, grams.c.boot_id == boots.c.id)
        .outerjoin(topologies, boots.c.topology == topologies.c.hash)
        .where(grams.c.run_id == run_id, grams.c.step == step)
        .where(or_(boots.c.until_step.is_(None), boots.c.until_step >= step))
        .order_by(grams.c.first_input)
    )
    sums: dict[tuple[Any, ...], dict[tuple[int, int], Row[Any]]] = defaultdict(dict)
    found: Sequence[Any] = (await connection.execute(query)).all()
    age = {
        row.id: i for i, row in enumerate(reversed(process_starts.in_order({row.id: row for row in found}.values())))
    }
    for row in sorted(found, key=lambda row: (row.first_input, age[row.id])):
        same = row.layer, row.began_step, row.heads, row.head_dim, row.size, row.all_inputs
        sums[same].setdefault((row.first_input, row.end_input), row)  # the newest's, where two sent the same part
    whole = ([*parts.values()] for (*_, all_inputs), parts in sums.items() if _tile(parts, all_inputs))
    return [_Complete(parts, json.loads(parts[0].heads)) for parts in whole if parts[0].layers is not None]


async def _triangles(connection: AsyncConnection, complete: _Complete) -> list[bytes]:
    """The matrices of the parts, in their order; fewer where some are gone."""
    query = select(grams.c.boot_id, grams.c.triangles).where(complete.own())
    held = {row.boot_id: row.triangles for row in await connection.execute(query)}
    return [held[part.boot_id] for part in complete.parts if part.boot_id in held]


def _tile(parts: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether the parts, by their start, cover [0, size) once."""
    at = 0
    for start, stop in parts:
        if start != at:
            return False
        at = stop
    return at == size


def spectral_norms(parts: Sequence[bytes], heads: int, head_dim: int) -> npt.NDArray[np.float32]:
    """Norms of W_Q, W_K and W_Q W_K^T, [3, heads], from the parts of their Gram matrices; NaN where one is not finite.

    With L = W_Q W_Q^T and W_K W_K^T = B B^T the third is the root of the largest eigenvalue of B^T L B.
    """
    upper = np.triu_indices(head_dim)
    summed = np.zeros(1)
    with np.errstate(invalid="ignore"):
        for part in parts:  # in float64, in the order of the inputs: the same parts give the same bits
            summed = summed + np.frombuffer(part, "<f4").reshape(-1, len(upper[0])).astype(np.float64)
    sound = np.logical_and.reduce(np.isfinite(summed), axis=1)
    matrices = np.zeros((len(summed), head_dim, head_dim))
    matrices[:, upper[0], upper[1]] = matrices[:, upper[1], upper[0]] = np.where(sound[:, None], summed, 0.0)
    group = heads // (len(summed) - heads)
    query, key = matrices[:heads], matrices[heads:]
    values, vectors = np.linalg.eigh(key)
    root = np.repeat(vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :], group, axis=0)
    largest = np.stack(
        [
            np.linalg.eigvalsh(query)[:, -1],
            np.repeat(values[:, -1], group),
            np.linalg.eigvalsh(root.transpose(0, 2, 1) @ query @ root)[:, -1],
        ]
    )
    known = np.stack([sound[:heads], np.repeat(sound[heads:], group)])
    known = np.stack([*known, known.all(axis=0)])
    with np.errstate(over="ignore"):
        return np.where(known, np.sqrt(np.maximum(largest, 0.0)), np.nan).astype(np.float32)


async def _store_norms(
    connection: AsyncConnection, first: Row[Any], place: dict[tuple[int, int], int], norms: npt.NDArray[np.float32]
) -> None:
    """Put the norms of some heads, [3, heads], beside those that the boot's sample of sequence 0 holds already."""
    refs = heads_of_layers(first.layers)
    same = (
        samples.c.run_id == first.run_id,
        samples.c.step == first.step,
        samples.c.boot_id == first.boot_id,
        samples.c.sequence == _SEQUENCE,
    )
    old = (await connection.execute(select(samples.c.id, samples.c.arrays).where(*same))).first()
    known = unpack_arrays(old.arrays) if old else {}
    arrays: dict[str, Any] = {}
    for name, values in zip(NORMS, norms, strict=True):
        whole = known[name].copy() if name in known else np.full(len(refs), np.nan, np.float32)
        for i, ref in enumerate(refs):
            if ref in place:
                whole[i] = values[place[ref]]
        arrays[name] = Array.of(whole)
    sample = Sample(step=first.step, since_step=first.step, unix_seconds=0.0, **arrays)
    row = {"run_id": first.run_id, "boot_id": first.boot_id, "sequence": _SEQUENCE, "position": 0}
    # a new row before the old one goes: its id is new too, by which a roll-up in the making sees that it is late
    await connection.execute(samples.insert().values(**row, **pack_sample(sample)))
    if old is not None:
        await connection.execute(delete(samples).where(samples.c.id == old.id))


async def _bound(connection: AsyncConnection, run_id: int) -> None:
    sizes = select(grams.c.step, func.sum(grams.c.size).label("size")).where(grams.c.run_id == run_id)
    found = (await connection.execute(sizes.group_by(grams.c.step).order_by(grams.c.step))).all()
    over = sum(row.size for row in found) - MAX_BYTES
    for row in found:
        if over <= 0:
            return
        await connection.execute(delete(grams).where(grams.c.run_id == run_id, grams.c.step == row.step))
        over -= row.size
