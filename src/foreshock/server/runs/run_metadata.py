"""What people say of a run and do with it as a whole: its display name, tags and notes, and its end."""

import json
import math
import time
from typing import Any, Final

from sqlalchemy import Connection, Row, select, update

from foreshock.contract.metrics.catalog import SILENT_SECONDS
from foreshock.server.access.problems import ProblemError
from foreshock.server.requests import Decision, Description
from foreshock.server.runs.eventlog import write_events
from foreshock.server.runs.listing import tags_of
from foreshock.server.runs.newest import status_of
from foreshock.server.runs.words import printable
from foreshock.server.store import audit, process_starts
from foreshock.server.store.database import Store, lock_runs
from foreshock.server.store.retention import delete_run
from foreshock.server.store.schema import runs

_WORDS: Final = {"display_name": "display name", "tags": "tags", "notes": "notes"}


def find_run(connection: Connection, run: str) -> Row[Any]:
    """The row of a run. Raises ProblemError when there is none."""
    row = connection.execute(select(runs).where(runs.c.name == run)).first()
    if row is None:
        raise ProblemError(404, f"There is no run {run[:128]!r}: it was deleted, or its name is misspelt.")
    return row


def describe(connection: Connection, run: str, who: str, description: Description) -> None:
    """Write down what is new, in the audit trail and the log too."""
    row = find_run(connection, run)
    lock_runs(connection, [row.id])
    row = find_run(connection, run)
    before = {"display_name": row.display_name or "", "tags": tags_of(row), "notes": row.notes or ""}
    wanted = {
        "display_name": description.display_name,
        "tags": None if description.tags is None else sorted(set(description.tags)),
        "notes": description.notes,
    }
    new = {key: value for key, value in wanted.items() if value is not None and value != before[key]}
    if not new:
        return
    stored = {key: (json.dumps(value) if key == "tags" else value) or None for key, value in new.items()}
    connection.execute(
        update(runs)
        .where(runs.c.id == row.id)
        .values(**stored, changes=runs.c.changes + 1)  # what was made of it is old
    )
    audit.append(connection, actor=who, action="described", run=run, details=new)
    sentence = printable(f"{who} changed the run's {' and '.join(_WORDS[key] for key in new)}.")
    own = {"run_id": row.id, "kind": "described", "unix_seconds": time.time(), "sentence": sentence}
    write_events(connection, [own])


async def delete(store: Store, run: str, who: str, decision: Decision) -> None:
    """Delete a run with all that belongs to it, a little at a time; the audit trail keeps who and why.

    Raises ProblemError where no run has this name, and where it still trains: it would come back with its next batch.
    """
    entry: dict[str, Any] = {"actor": who, "run": run, "details": {"reason": decision.reason}}

    def begin(connection: Connection) -> Row[Any]:
        row = find_run(connection, run)
        starts = process_starts.of_now(connection, [row.id])[row.id]
        if status_of(starts) == "active" and time.time() - row.last_seen < SILENT_SECONDS:
            raise ProblemError(409, _trains(run))
        audit.append(connection, action="deletion begun", **entry)
        return row

    def record(connection: Connection) -> None:
        audit.append(connection, action="deleted", **entry)

    row = await store.write(begin)
    if not await delete_run(store, row.id, math.nextafter(row.last_seen, math.inf), record):
        raise ProblemError(409, _trains(run))


def _trains(run: str) -> str:
    return (
        f"Run {run} still trains, and would come back with its next batch. Stop it, or wait until nothing has been "
        f"heard of it for {SILENT_SECONDS:.0f} s."
    )
