"""Writes a group of batches in one transaction, each batch exactly once.

The rows do not depend on the order in which batches arrive: everything stored per boot is a sum, a minimum, or the
value with the highest sequence.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, case, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from foreshock.contract.wire import (
    AgentHealth,
    Batch,
    Clipped,
    Event,
    Finished,
    Layer,
    Sample,
    Started,
    Switched,
    Verdict,
)
from foreshock.server.process_order import Arrival, place, record_shared_ranks, supersede
from foreshock.server.readings import SPAN, changed_runs, changed_spans, heads_of_layers, pack_sample
from foreshock.server.runs.current import heads_measured, with_sample
from foreshock.server.runs.eventlog import Logged, sentence_of, write_events
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import Many, insert_or_ignore, lock_runs
from foreshock.server.store.process_starts import BootKey, place_of
from foreshock.server.store.schema import batches, boots, runs, samples, topologies, warnings

Brought = Sequence[tuple[Row[Any], list[Batch]]]
"""Process starts in the order of their ids, as stored before this group, each with its new batches by sequence."""


def _events_of(brought: Brought) -> Iterator[tuple[Row[Any], Batch, int, Event]]:
    """Yield (process start, batch, position in the batch, event) for every event."""
    for start, new in brought:
        for batch in new:
            for position, event in enumerate(batch.events):
                yield start, batch, position, event


def _keep(insert: sqlite.Insert | postgresql.Insert) -> Many:
    changed = {column.name: insert.excluded[column.name] for column in warnings.c if not column.primary_key}
    key = [column.name for column in warnings.primary_key]
    return Many(insert.on_conflict_do_update(index_elements=key, set_=changed), warnings.c.keys())


_KEEP: Final = {"sqlite": _keep(sqlite.insert(warnings)), "postgresql": _keep(postgresql.insert(warnings))}


def merge_warnings(connection: Connection, brought: Brought) -> None:
    """Store the newest verdict of each warning; the result does not depend on the order of verdicts."""
    verdicts = [
        (start, batch, position, event)
        for start, batch, position, event in _events_of(brought)
        if isinstance(event, Verdict) and event.severity != "info"  # a note is not a warning
    ]
    if not verdicts:
        return
    query = select(warnings).where(
        warnings.c.run_id.in_({start.run_id for start, *_ in verdicts}),
        warnings.c.uid.in_({verdict.id for *_, verdict in verdicts}),
    )
    newest = {(row.run_id, row.rank, row.uid): dict(row._mapping) for row in connection.execute(query)}
    spoke = {old["boot_id"] for old in newest.values()} | {start.id for start, *_ in verdicts}
    starts = connection.execute(select(boots).where(boots.c.id.in_(spoke))) if len(spoke) > 1 else ()
    places = {row.id: i for i, row in enumerate(process_starts.in_order(starts))}
    touched: set[tuple[int, int, str]] = set()
    for start, batch, position, verdict in verdicts:
        key = start.run_id, batch.rank, verdict.id
        old = newest.get(key)
        touched.add(key)
        row = {
            "run_id": key[0],
            "rank": key[1],
            "uid": key[2],
            "boot_id": start.id,
            "boot": batch.boot,
            "sequence": batch.sequence,
            "position": position,
            "raised_step": verdict.step,
            "cause": verdict.cause,
            "active": verdict.state != "cleared",
            "verdict": verdict.model_dump_json(),
            "rejected": old is not None and old["rejected"] and verdict.state != "raised",
        }
        if old is not None:
            raised = min(old["raised_step"], verdict.step)
            if _newness(old, places) > _newness(row, places):
                row = old
            row = {**row, "raised_step": raised}
        newest[key] = row
    _KEEP[connection.dialect.name].execute(connection, [newest[key] for key in sorted(touched)])


def _newness(row: dict[str, Any], places: dict[int, int]) -> tuple[int, int, int]:
    return places.get(row["boot_id"], 0), row["sequence"], row["position"]


_NOT_MERGED = ("id", "run_id", "rank", "boot", "newest", "until_step")
_MERGED = [column.name for column in boots.c if column.name not in _NOT_MERGED]
"""Columns that batches change in the row of their process start. process_order sets `newest` and `until_step`."""
_FIND_RUNS = select(runs.c.name, runs.c.id).where(runs.c.name.in_(bindparam("names", expanding=True)))
_FIND_BOOTS = select(boots).where(
    boots.c.run_id.in_(bindparam("run_ids", expanding=True)), boots.c.boot.in_(bindparam("names", expanding=True))
)
_MERGE_BOOTS = Many(
    update(boots).where(boots.c.id == bindparam("row_id")).values({c: bindparam(f"new_{c}") for c in _MERGED}),
    ["row_id"],
)
_WRITE_SAMPLES = Many(samples.insert(), [column.name for column in samples.c if column is not samples.c.id])
_AHEAD_SECONDS = 7200.0
"""A `last_seen` in the future, up to this limit, comes from another replica's clock or from one that was set back by an
hour at the end of summer time, and stays; a later one comes from a wrong clock, and is overwritten."""
_HEARD_LATER = runs.c.last_seen.between(bindparam("now"), bindparam("soon"))
_SEE_RUNS = Many(
    update(runs)
    .where(runs.c.id == bindparam("own"))
    .values(
        last_seen=case((_HEARD_LATER, runs.c.last_seen), else_=bindparam("now")),
        changes=runs.c.changes + literal_column("1"),
    ),
    ["own", "now", "soon"],
)
"""Compiled once, because building a statement takes longer than executing it."""
_REMEMBERED = 4096
_heads_of: dict[str, int] = {}
"""Cache of the number of heads of a topology, by its hash, so that commits do not read its layers."""


class MisfitError(ValueError):
    """A batch does not fit the description of its boot; the message says how."""


@dataclass
class Recorded:
    """The changes by a group of batches."""

    new: list[Batch] = field(default_factory=list)
    run_ids: dict[str, int] = field(default_factory=dict)
    switched: list[tuple[Batch, Switched]] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    """Runs with new samples."""
    changed: set[int] = field(default_factory=set)
    """Runs whose incidents a verdict or a switch may have changed."""
    unexplained: set[BootKey] = field(default_factory=set)
    """Process starts of which the store has no description (`Started`)."""


def key_of(batch: Batch) -> BootKey:
    """Return the key of the boot that sent the batch."""
    return batch.run, batch.rank, batch.boot


def record(connection: Connection, group: Sequence[Batch], arrivals: Mapping[BootKey, Arrival]) -> Recorded:
    """Write every batch of the group that is not stored yet. arrivals: headers of each process start's batches."""
    now = time.time()
    done = Recorded(run_ids=_find_runs(connection, group, now))
    # Locked first, so that values derived from a run's rows include those that another replica is writing.
    lock_runs(connection, done.run_ids.values())
    brought = _new_of(connection, group, _find_boots(connection, group, now, done.run_ids))
    done.new = [batch for _, new in brought for batch in new]
    if not done.new:
        return done
    _check_heads(connection, brought)
    done.stepped = _write_samples(connection, brought)
    arrived = {start.id: arrivals[key_of(new[0])] for start, new in brought}
    placed = place(connection, {start.id: start for start, _ in brought}, arrived, now)
    living = {i for i, arrival in arrived.items() if not arrival.replayed}
    _merge_boots(connection, done, brought, placed, living, now)
    _write_events(connection, done, brought, now)
    record_shared_ranks(connection, [start for start, _ in brought if start.id in living], now)
    merge_warnings(connection, brought)
    seen = {"now": now, "soon": now + _AHEAD_SECONDS}
    _SEE_RUNS.execute(connection, [{"own": run, **seen} for run in sorted({start.run_id for start, _ in brought})])
    return done


def _find_runs(connection: Connection, group: Sequence[Batch], now: float) -> dict[str, int]:
    """Return the ids of the runs by name; insert a row for a new run."""
    names = sorted({batch.run for batch in group})
    # A new run may get the id of a deleted one. Its `changes` start at the present time, so that data cached for the
    # deleted run are not used for the new one.
    first = {"first_seen": now, "last_seen": now, "changes": int(1e6 * now)}
    connection.execute(insert_or_ignore(connection, runs), [{"name": name, **first} for name in names])
    return {row.name: row.id for row in connection.execute(_FIND_RUNS, {"names": names})}


def _find_boots(
    connection: Connection, group: Sequence[Batch], now: float, run_ids: Mapping[str, int]
) -> dict[BootKey, Row[Any]]:
    """Return the rows of the process starts; insert a row for a new one."""
    keys = sorted({key_of(batch) for batch in group})
    run_names = {run_id: name for name, run_id in run_ids.items()}
    wanted = {"run_ids": sorted(run_names), "names": sorted({boot for _, _, boot in keys})}

    def find() -> dict[BootKey, Row[Any]]:
        found = connection.execute(_FIND_BOOTS, wanted)
        return {(run_names[row.run_id], row.rank, row.boot): row for row in found}

    known = find()
    if absent := [key for key in keys if key not in known]:
        new = [
            {"run_id": run_ids[run], "rank": rank, "boot": boot, "place": place_of(None, boot), "last_seen": now}
            for run, rank, boot in absent
        ]
        connection.execute(insert_or_ignore(connection, boots), new)
        known = find()
    return known


def _new_of(connection: Connection, group: Sequence[Batch], starts: Mapping[BootKey, Row[Any]]) -> Brought:
    wanted = {(starts[key_of(batch)].id, batch.sequence): batch for batch in reversed(group)}
    values = [{"boot_id": boot_id, "sequence": sequence} for boot_id, sequence in sorted(wanted)]
    statement = insert_or_ignore(connection, batches).returning(batches.c.boot_id, batches.c.sequence)
    brought: dict[BootKey, list[Batch]] = {}
    for boot_id, sequence in sorted((row.boot_id, row.sequence) for row in connection.execute(statement, values)):
        batch = wanted[boot_id, sequence]
        brought.setdefault(key_of(batch), []).append(batch)
    return [(starts[key], new) for key, new in brought.items()]


def _check_heads(connection: Connection, brought: Brought) -> None:
    """Raise MisfitError if the number of heads in a sample differs from the number that its process registered."""
    if len(_heads_of) > _REMEMBERED:
        _heads_of.clear()
    if unknown := {start.topology for start, _ in brought} - {None} - _heads_of.keys():
        for row in connection.execute(select(topologies).where(topologies.c.hash.in_(unknown))):
            _heads_of[row.hash] = len(heads_of_layers(row.layers))
    for start, new in brought:
        registered, measured = _heads_of.get(start.topology), heads_measured(start.measured)
        for *_, event in _events_of([(start, new)]):
            if isinstance(event, Started):
                registered = sum(len(layer.heads) for layer in event.layers)
                if measured not in (None, registered):  # earlier samples must stay readable
                    raise MisfitError(
                        f"This process registers {registered} heads, but its earlier samples have data for {measured}. "
                        "The batch was not stored. Give the new process another `boot`."
                    )
            elif isinstance(event, Sample):
                wanted = measured if registered is None else registered
                for measured in event.head_counts():
                    if wanted not in (None, measured):
                        raise MisfitError(
                            f"The sample of step {event.step} has data for {measured} heads, but this process "
                            f"registered {wanted}. The batch was not stored."
                        )


def _write_samples(connection: Connection, brought: Brought) -> set[int]:
    """Write the samples, and return the ids of their runs."""
    rows = [
        {"run_id": start.run_id, "boot_id": start.id, "sequence": batch.sequence, "position": position}
        | pack_sample(event)
        for start, batch, position, event in _events_of(brought)
        if isinstance(event, Sample)
    ]
    if rows:
        _WRITE_SAMPLES.execute(connection, rows)
        changed_spans(connection, {(row["run_id"], row["step"] // SPAN) for row in rows})
    return {row["run_id"] for row in rows}


def _merge_boots(
    connection: Connection,
    done: Recorded,
    brought: Brought,
    placed: Mapping[int, dict[str, Any]],
    living: Collection[int],
    now: float,
) -> None:
    merged: list[dict[str, Any]] = []
    layers_by_hash: dict[str, str] = {}
    moved = {*placed, *(start.id for start, _ in brought if start.last_sequence == 0)}
    for start, new in brought:
        boot_id = start.id
        boot = start._asdict() | placed.get(boot_id, {})
        boot["last_sequence"] = max(start.last_sequence, new[-1].sequence)
        merged.append(boot)
        if boot_id in living:
            if process_starts.may_be_gone_or_back(start, now):
                moved.add(boot_id)
            boot |= {"last_seen": now, "beside": start.beside or (start.last_sequence > 0 and not start.newest)}
        for _, batch, _, event in _events_of([(start, new)]):
            if isinstance(event, Started | Sample | AgentHealth) and (
                boot["stepped"] is None or event.step > boot["newest_step"]
            ):
                boot |= {"newest_step": event.step, "stepped": now}
            if isinstance(event, Started):
                boot["topology"] = _topology(event.layers, layers_by_hash)
                boot["description"] = event.model_dump_json(exclude={"layers"})
                boot["started_step"] = event.step
                boot["world_size"] = event.world_size if batch.rank < event.world_size else None
                moved.add(boot_id)
            elif isinstance(event, Sample):
                # a non-finite gradient with a finite loss belongs to a step that a loss scaler skips
                has_loss = event.loss is not None or event.loss_nonfinite_steps
                boot["measured"] = with_sample(boot["measured"], event)
                boot["nonfinite_steps"] += event.loss_nonfinite_steps if has_loss else event.grad_norm_nonfinite_steps
                if boot["earliest_step"] is None or event.since_step < boot["earliest_step"]:
                    boot["earliest_step"] = event.since_step
                    moved.add(boot_id)
            elif isinstance(event, AgentHealth) and batch.sequence >= boot["health_sequence"]:
                boot["health"] = event.model_dump_json() if event.dropped or event.faults else None
                boot["health_sequence"] = batch.sequence
            elif isinstance(event, Finished):
                boot["finished_status"] = event.status
        if boot["description"] is None:
            done.unexplained.add(key_of(new[0]))
    if layers_by_hash:
        values = [{"hash": digest, "layers": layers} for digest, layers in sorted(layers_by_hash.items())]
        connection.execute(insert_or_ignore(connection, topologies), values)
    changes = [{"row_id": boot["id"], **{f"new_{c}": boot[c] for c in _MERGED}} for boot in merged]
    _MERGE_BOOTS.execute(connection, changes)
    supersede(connection, [start for start, _ in brought if start.id in moved])
    both = zip(brought, merged, strict=True)
    changed_runs(connection, {start.run_id for (start, _), boot in both if boot["topology"] != start.topology})


def _topology(layers: tuple[Layer, ...], seen: dict[str, str]) -> str:
    text = json.dumps([layer.model_dump(mode="json") for layer in layers], separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    seen[digest] = text
    return digest


def _write_events(connection: Connection, done: Recorded, brought: Brought, now: float) -> None:
    rows: list[dict[str, Any]] = []
    clipped: list[tuple[Batch, Clipped]] = []
    for start, new in brought:
        introduced = start.description is not None
        for _, batch, _, event in _events_of([(start, new)]):
            if not isinstance(event, Logged) or (isinstance(event, Started) and introduced):
                continue  # a process repeats its `started` if the service asks for it
            row: dict[str, Any] = {"run_id": start.run_id, "boot_id": start.id, "rank": batch.rank, "kind": event.kind}
            row |= {"step": event.step, "unix_seconds": now, "sentence": sentence_of(batch.rank, event)}
            row |= {"mode": None, "outcome": None, "payload": None}
            if isinstance(event, Started):
                introduced = True
            elif not isinstance(event, Finished):
                row["payload"] = event.model_dump_json()
            if isinstance(event, Verdict):
                done.changed.add(start.run_id)
                row["outcome"] = event.state
            elif isinstance(event, Switched):
                done.changed.add(start.run_id)
                done.switched.append((batch, event))
                row |= {"mode": event.after[0] if event.after else None, "outcome": event.outcome}
            elif isinstance(event, Clipped):
                clipped.append((batch, event))
            rows.append(row)
    write_events(connection, rows)
    for batch, event in clipped:
        details: dict[str, Any] = {"on": event.on, "step": event.step, "reason": event.reason}
        if event.heads:
            heads = [list(ref) for ref in event.heads[:64]]
            details |= {"heads": heads, "smallest_factor": min(event.factors), "times": sum(event.times)}
        actor = f"rank {batch.rank}"
        audit.append(connection, actor=actor, action="qk_clip", run=batch.run, details=details)
