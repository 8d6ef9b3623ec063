"""Writes batches: in one transaction, in any order, each exactly once.

Whatever the order of arrival, the same batches leave the same rows: everything kept per boot is a sum, a minimum, or
the value with the highest sequence.
"""

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, bindparam, case, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from foreshock.contract.wire import AgentHealth, Batch, Finished, Grams, Layer, Sample, Started, Switched, Verdict
from foreshock.server.curves.rollups import COARSE, forget, forget_runs
from foreshock.server.ingest.arrivals import Arrival
from foreshock.server.ingest.grams import Part, keep_parts
from foreshock.server.ingest.placing import place, starts_of, supersede
from foreshock.server.runs.words import finished_sentence, printable, started_sentence, switched_sentence
from foreshock.server.store import process_starts
from foreshock.server.store.database import Store, insert_or_ignore
from foreshock.server.store.many import Many
from foreshock.server.store.packing import pack_sample
from foreshock.server.store.schema import batches, boots, events, runs, samples, topologies, warnings
from foreshock.server.store.topology import heads_of_layers

BootKey = tuple[str, int, str]
WarningKey = tuple[int, int, str]
"""(run id, rank, the agent's own name of it)."""
_MERGED = (
    "last_sequence",
    "last_seen",
    "topology",
    "description",
    "started_step",
    "earliest_step",
    "health",
    "health_sequence",
    "nonfinite_steps",
    "finished_status",
    "began",
    "replayed",
    "newest_step",
    "stepped",
)


_FIND_RUNS = select(runs.c.name, runs.c.id).where(runs.c.name.in_(bindparam("names", expanding=True)))
_FIND_BOOTS = select(boots).where(
    boots.c.run_id.in_(bindparam("run_ids", expanding=True)), boots.c.boot.in_(bindparam("names", expanding=True))
)
_MERGE_BOOTS = Many(
    update(boots).where(boots.c.id == bindparam("row_id")).values({c: bindparam(f"new_{c}") for c in _MERGED}),
    ["row_id"],
)
_WRITE_SAMPLES = Many(samples.insert(), [column.name for column in samples.c if column is not samples.c.id])
_WRITE_WARNINGS = Many(warnings.insert(), [column.name for column in warnings.c])
_KEY_OF_WARNING = (warnings.c.run_id, warnings.c.rank, warnings.c.uid)
_CHANGE_WARNINGS = Many(
    update(warnings)
    .where(*(column == bindparam(f"new_{column.name}") for column in _KEY_OF_WARNING))
    .values({column: bindparam(f"new_{column.name}") for column in warnings.c if not column.primary_key}),
    [f"new_{column.name}" for column in _KEY_OF_WARNING],
)
_SEE_RUNS = Many(
    update(runs)
    .where(runs.c.id == bindparam("own"))
    .values(
        last_seen=case((runs.c.last_seen < bindparam("now"), bindparam("now")), else_=runs.c.last_seen),
        changes=runs.c.changes + literal_column("1"),
    ),
    ["own", "now"],
)
"""Made once: to put a statement together takes longer than to execute it."""
_REMEMBERED = 4096
_heads_of: dict[str, int] = {}
"""How many heads a topology has, by its hash: known without reading its layers again at every commit."""


class MisfitError(ValueError):
    """A batch that does not fit what its boot said of itself; the message says how."""


@dataclass
class Recorded:
    """What a group of batches changed."""

    new: list[Batch] = field(default_factory=list)
    boot_ids: dict[BootKey, int] = field(default_factory=dict)
    run_ids: dict[str, int] = field(default_factory=dict)
    switched: list[tuple[Batch, Switched]] = field(default_factory=list)
    stepped: set[tuple[int, int]] = field(default_factory=set)
    """(run id, step) of every sample."""
    summed: set[tuple[int, int]] = field(default_factory=set)
    """(run id, step) whose sums of Gram matrices may be complete now."""
    told: set[int] = field(default_factory=set)
    """Runs of which something was told that an incident may change by: a verdict, a switch."""
    unexplained: set[BootKey] = field(default_factory=set)
    """Process starts that have never said what they watch, as far as the store remembers."""


def key_of(batch: Batch) -> BootKey:
    """What identifies the boot that sent the batch."""
    return batch.run, batch.rank, batch.boot


async def record(
    store: Store, connection: AsyncConnection, group: Sequence[Batch], arrivals: Mapping[BootKey, Arrival]
) -> Recorded:
    """Write every batch of the group that is not stored yet. `arrivals` says how those of each process start came."""
    now = time.time()
    done = Recorded()
    await _find_runs(store, connection, group, now, done)
    # Locked first, so that what is derived from a run's rows never misses some that another replica is writing.
    await store.lock_runs(connection, done.run_ids.values())
    found = await _find_boots(store, connection, group, now, done)
    await _keep_new(store, connection, group, done)
    if not done.new:
        return done
    run_ids = {done.run_ids[b.run] for b in done.new}
    rows = {i: found[i] for i in sorted({done.boot_ids[key_of(b)] for b in done.new})}
    await _check_heads(connection, done, rows)
    await _write_samples(connection, done)
    told = {done.boot_ids[key_of(batch)]: arrivals[key_of(batch)] for batch in done.new}
    placed = await place(connection, rows, told, now)
    await _merge_boots(store, connection, done, rows, placed, now)
    await _write_events(store, connection, done, rows, now)
    await _merge_warnings(connection, done)
    await _keep_grams(store, connection, done, now)
    await _SEE_RUNS.execute(connection, [{"own": run_id, "now": now} for run_id in sorted(run_ids)])
    return done


async def _find_runs(
    store: Store, connection: AsyncConnection, group: Sequence[Batch], now: float, done: Recorded
) -> None:
    """Find or make them."""
    names = sorted({batch.run for batch in group})
    for attempt in (1, 2):
        found = await connection.execute(_FIND_RUNS, {"names": names})
        done.run_ids = {row.name: row.id for row in found}
        missing = [name for name in names if name not in done.run_ids]
        if not missing or attempt == 2:
            break
        # A run may get the number of one that was deleted; what was made of that one is not taken for the new one's,
        # since its changes are counted on from another moment.
        since = int(1e6 * now)
        values = [{"name": name, "first_seen": now, "last_seen": now, "changes": since} for name in missing]
        await connection.execute(insert_or_ignore(store, runs), values)


async def _find_boots(
    store: Store, connection: AsyncConnection, group: Sequence[Batch], now: float, done: Recorded
) -> dict[int, Row[Any]]:
    """Find or make them: their rows by id."""
    keys = sorted({key_of(batch) for batch in group})
    run_names = {run_id: name for name, run_id in done.run_ids.items()}
    wanted = {"run_ids": sorted(run_names), "names": sorted({boot for _, _, boot in keys})}
    rows: dict[int, Row[Any]] = {}
    for attempt in (1, 2):
        rows = {row.id: row for row in await connection.execute(_FIND_BOOTS, wanted)}
        done.boot_ids = {(run_names[row.run_id], row.rank, row.boot): i for i, row in rows.items()}
        absent = [key for key in keys if key not in done.boot_ids]
        if not absent or attempt == 2:
            break
        values = [
            {"run_id": done.run_ids[run], "rank": rank, "boot": boot, "last_seen": now} for run, rank, boot in absent
        ]
        await connection.execute(insert_or_ignore(store, boots), values)
    return rows


async def _keep_new(store: Store, connection: AsyncConnection, group: Sequence[Batch], done: Recorded) -> None:
    wanted = {(done.boot_ids[key_of(b)], b.sequence): b for b in reversed(group)}
    values = [{"boot_id": boot_id, "sequence": sequence} for boot_id, sequence in sorted(wanted)]
    statement = insert_or_ignore(store, batches).returning(batches.c.boot_id, batches.c.sequence)
    stored = {(row.boot_id, row.sequence) for row in await connection.execute(statement, values)}
    done.new = [wanted[key] for key in sorted(stored)]


async def _check_heads(connection: AsyncConnection, done: Recorded, rows: dict[int, Row[Any]]) -> None:
    """Raises MisfitError when a sample speaks of other heads than its boot watches, as far as that is known."""
    if len(_heads_of) > _REMEMBERED:
        _heads_of.clear()
    if unknown := {row.topology for row in rows.values()} - {None} - _heads_of.keys():
        for row in await connection.execute(select(topologies).where(topologies.c.hash.in_(unknown))):
            _heads_of[row.hash] = len(heads_of_layers(row.layers))
    watched: dict[int, int] = {}
    for batch in done.new:
        boot_id = done.boot_ids[key_of(batch)]
        for event in batch.events:
            if isinstance(event, Started):
                watched[boot_id] = sum(len(layer.heads) for layer in event.layers)
        want = watched.get(boot_id, _heads_of.get(rows[boot_id].topology))
        for event in batch.events:
            if isinstance(event, Sample) and want and not event.head_counts() <= {want}:
                raise MisfitError(
                    f"The sample of step {event.step} speaks of {event.head_counts().pop()} heads, its boot watches "
                    f"{want}; nothing of the batch was stored."
                )


async def _write_samples(connection: AsyncConnection, done: Recorded) -> None:
    rows = []
    for batch in done.new:
        for position, sample in enumerate(batch.events):
            if isinstance(sample, Sample):
                rows.append(
                    {
                        "run_id": done.run_ids[batch.run],
                        "boot_id": done.boot_ids[key_of(batch)],
                        "sequence": batch.sequence,
                        "position": position,
                        **pack_sample(sample),
                    }
                )
    if rows:
        await _WRITE_SAMPLES.execute(connection, rows)
        done.stepped = {(row["run_id"], row["step"]) for row in rows}
        await forget(connection, {(run_id, step // COARSE) for run_id, step in done.stepped})


async def _keep_grams(store: Store, connection: AsyncConnection, done: Recorded, now: float) -> None:
    owned = [(done.run_ids[b.run], done.boot_ids[key_of(b)], event) for b in done.new for event in b.events]
    parts = [Part(run_id, boot_id, event) for run_id, boot_id, event in owned if isinstance(event, Grams)]
    started = {boot_id for _, boot_id, event in owned if isinstance(event, Started)}
    if parts or started:
        done.summed = await keep_parts(store, connection, parts, started, now)


async def _merge_boots(
    store: Store,
    connection: AsyncConnection,
    done: Recorded,
    rows: dict[int, Row[Any]],
    placed: dict[int, dict[str, Any]],
    now: float,
) -> None:
    merged: dict[int, dict[str, Any]] = {}
    layers_by_hash: dict[str, str] = {}
    moved = set(placed)
    for batch in done.new:
        boot_id = done.boot_ids[key_of(batch)]
        boot = merged.setdefault(boot_id, {**rows[boot_id]._asdict(), **placed.get(boot_id, {})})
        boot["last_sequence"] = max(boot["last_sequence"], batch.sequence)
        boot["last_seen"] = now
        for event in batch.events:
            if isinstance(event, Started | Sample | AgentHealth) and (
                boot["stepped"] is None or event.step > boot["newest_step"]
            ):
                boot |= {"newest_step": event.step, "stepped": now}
            if isinstance(event, Started):
                boot["topology"] = _topology(event.layers, layers_by_hash)
                boot["description"] = event.model_dump_json(exclude={"layers"})
                boot["started_step"] = event.step
                moved.add(boot_id)
            elif isinstance(event, Sample):
                # gradients that overflow beside a finite loss are those of a step that a loss scaler skips
                told = event.loss is not None or event.loss_nonfinite_steps
                boot["nonfinite_steps"] += event.loss_nonfinite_steps if told else event.grad_norm_nonfinite_steps
                if boot["earliest_step"] is None or event.since_step < boot["earliest_step"]:
                    boot["earliest_step"] = event.since_step
                    moved.add(boot_id)
            elif isinstance(event, AgentHealth) and batch.sequence >= boot["health_sequence"]:
                boot["health"] = event.model_dump_json()
                boot["health_sequence"] = batch.sequence
            elif isinstance(event, Finished):
                boot["finished_status"] = event.status
    done.unexplained = {key for key, i in done.boot_ids.items() if i in merged and merged[i]["description"] is None}
    if layers_by_hash:
        values = [{"hash": digest, "layers": layers} for digest, layers in sorted(layers_by_hash.items())]
        await connection.execute(insert_or_ignore(store, topologies), values)
    changes = [{"row_id": i, **{f"new_{c}": boot[c] for c in _MERGED}} for i, boot in sorted(merged.items())]
    await _MERGE_BOOTS.execute(connection, changes)
    if moved:
        await supersede(connection, {(merged[i]["run_id"], merged[i]["rank"]) for i in moved})
    reshaped = {merged[i]["run_id"] for i in moved if merged[i]["topology"] != rows[i].topology}
    await forget_runs(connection, reshaped)


def _topology(layers: tuple[Layer, ...], seen: dict[str, str]) -> str:
    text = json.dumps([layer.model_dump(mode="json") for layer in layers], separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    seen[digest] = text
    return digest


async def _write_events(
    store: Store, connection: AsyncConnection, done: Recorded, before: dict[int, Row[Any]], now: float
) -> None:
    rows: list[dict[str, Any]] = []
    introduced = {boot_id for boot_id, row in before.items() if row.description is not None}
    for batch in done.new:
        boot_id = done.boot_ids[key_of(batch)]
        for event in batch.events:
            row: dict[str, Any] = {"mode": None, "outcome": None, "payload": None}
            if isinstance(event, Verdict):
                row |= {
                    "sentence": printable(event.sentence),
                    "payload": event.model_dump_json(),
                    "outcome": event.state,
                }
            elif isinstance(event, Switched):
                done.switched.append((batch, event))
                row |= {"sentence": switched_sentence(event), "payload": event.model_dump_json()}
                row |= {"mode": event.after[0] if event.after else None, "outcome": event.outcome}
            elif isinstance(event, Started):
                if boot_id in introduced:  # it says it again because it was asked to
                    continue
                introduced.add(boot_id)
                row |= {"sentence": started_sentence(batch.rank, event)}
            elif isinstance(event, Finished):
                row |= {"sentence": finished_sentence(batch.rank, event)}
            else:
                continue
            if isinstance(event, Verdict | Switched):
                done.told.add(done.run_ids[batch.run])
            row |= {"run_id": done.run_ids[batch.run], "boot_id": boot_id, "rank": batch.rank}
            rows.append(row | {"kind": event.kind, "step": event.step, "unix_seconds": now})
    if rows:
        await store.lock_log(connection)
        await connection.execute(events.insert(), rows)


async def _merge_warnings(connection: AsyncConnection, done: Recorded) -> None:
    """Keep each warning's newest word, whatever order the words came in."""
    newest: dict[WarningKey, dict[str, Any]] = {}
    verdicts = [
        (batch, position, event)
        for batch in done.new
        for position, event in enumerate(batch.events)
        if isinstance(event, Verdict)
    ]
    if not verdicts:
        return
    query = select(warnings).where(
        warnings.c.run_id.in_({done.run_ids[batch.run] for batch, _, _ in verdicts}),
        warnings.c.uid.in_({verdict.id for _, _, verdict in verdicts}),
    )
    before = {(row.run_id, row.rank, row.uid): dict(row._mapping) for row in await connection.execute(query)}
    told_by = {old["boot_id"] for old in before.values()} | {done.boot_ids[key_of(batch)] for batch, _, _ in verdicts}
    ranks = {(done.run_ids[batch.run], batch.rank) for batch, _, _ in verdicts} if len(told_by) > 1 else set()
    starts = [process_starts.in_order(rows) for rows in (await starts_of(connection, ranks)).values()] if ranks else []
    places = {row.id: i for own in starts for i, row in enumerate(own)}
    for batch, position, verdict in verdicts:
        key = done.run_ids[batch.run], batch.rank, verdict.id
        old = newest.get(key) or before.get(key)
        row = {
            "run_id": key[0],
            "rank": key[1],
            "uid": key[2],
            "boot_id": done.boot_ids[key_of(batch)],
            "boot": batch.boot,
            "sequence": batch.sequence,
            "position": position,
            "raised_step": verdict.step,
            "cause": verdict.cause,
            "active": verdict.state != "cleared",
            "verdict": verdict.model_dump_json(),
        }
        if old is not None:
            raised = min(old["raised_step"], verdict.step)
            if _newness(old, places) > _newness(row, places):
                row = old
            row = {**row, "raised_step": raised}
        newest[key] = row
    await _write_warnings(connection, newest, before.keys())


def _newness(row: dict[str, Any], places: dict[int, int]) -> tuple[int, int, int]:
    return places.get(row["boot_id"], 0), row["sequence"], row["position"]


async def _write_warnings(
    connection: AsyncConnection, newest: dict[WarningKey, dict[str, Any]], known: Collection[WarningKey]
) -> None:
    if new := sorted(newest.keys() - set(known)):
        await _WRITE_WARNINGS.execute(connection, [newest[key] for key in new])
    if changed := sorted(newest.keys() & set(known)):
        values = [{f"new_{name}": value for name, value in newest[key].items()} for key in changed]
        await _CHANGE_WARNINGS.execute(connection, values)
