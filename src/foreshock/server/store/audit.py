"""The audit trail: rows can only be appended; the database rejects updates and deletions (schema.APPEND_ONLY)."""

import json
import time
from typing import Any

from sqlalchemy import Connection, desc, func, insert, select

from foreshock.server.models import AuditRow
from foreshock.server.store.database import lock_log
from foreshock.server.store.schema import audit


def append(
    connection: Connection,
    *,
    actor: str,
    action: str,
    run: str | None = None,
    command: str | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Append a row in the caller's transaction, so that it is committed together with the change that it records."""
    lock_log(connection)
    last = connection.execute(select(func.max(audit.c.sequence))).scalar() or 0
    row = {"sequence": last + 1, "unix_seconds": time.time(), "actor": actor[:160], "action": action}
    values = {**row, "run": run, "command": command, "details": json.dumps(details or {}, sort_keys=True)}
    connection.execute(insert(audit).values(**values))


def rows(connection: Connection, limit: int, *, before: int | None = None, after: int | None = None) -> list[AuditRow]:
    """Return rows, newest first; with `after`, the rows that follow this sequence number, oldest first."""
    query = select(audit).order_by(desc(audit.c.sequence) if after is None else audit.c.sequence).limit(limit)
    if before is not None:
        query = query.where(audit.c.sequence < before)
    if after is not None:
        query = query.where(audit.c.sequence > after)
    found = connection.execute(query)
    return [AuditRow.model_validate({**row._mapping, "details": json.loads(row.details)}) for row in found]
