"""The latest state of each warning, whichever order its updates came in."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from foreshock.contract.wire import Batch, Verdict
from foreshock.server.store import process_starts
from foreshock.server.store.many import Many
from foreshock.server.store.schema import boots, warnings


def _keep(insert: sqlite.Insert | postgresql.Insert) -> Many:
    changed = {column.name: insert.excluded[column.name] for column in warnings.c if not column.primary_key}
    key = [column.name for column in warnings.primary_key]
    return Many(insert.on_conflict_do_update(index_elements=key, set_=changed), warnings.c.keys())


_KEEP: Final = {"sqlite": _keep(sqlite.insert(warnings)), "postgresql": _keep(postgresql.insert(warnings))}


def merge_warnings(connection: Connection, group: Sequence[tuple[int, int, Batch]]) -> None:
    """Keep each warning's newest word, whatever order the words came in. group: (run id, boot id, batch) of each."""
    verdicts = [
        (run_id, boot_id, batch, position, event)
        for run_id, boot_id, batch in group
        for position, event in enumerate(batch.events)
        if isinstance(event, Verdict) and event.severity != "info"  # a note never stands
    ]
    if not verdicts:
        return
    query = select(warnings).where(
        warnings.c.run_id.in_({run_id for run_id, *_ in verdicts}),
        warnings.c.uid.in_({verdict.id for *_, verdict in verdicts}),
    )
    newest = {(row.run_id, row.rank, row.uid): dict(row._mapping) for row in connection.execute(query)}
    spoke = {old["boot_id"] for old in newest.values()} | {boot_id for _, boot_id, *_ in verdicts}
    starts = connection.execute(select(boots).where(boots.c.id.in_(spoke))) if len(spoke) > 1 else ()
    places = {row.id: i for i, row in enumerate(process_starts.in_order(starts))}
    touched: set[tuple[int, int, str]] = set()
    for run_id, boot_id, batch, position, verdict in verdicts:
        key = run_id, batch.rank, verdict.id
        old = newest.get(key)
        touched.add(key)
        row = {
            "run_id": key[0],
            "rank": key[1],
            "uid": key[2],
            "boot_id": boot_id,
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
