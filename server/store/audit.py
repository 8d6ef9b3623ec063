"""The audit trail: append-only, each row hashed over the one before, so that a changed or missing row shows."""

import hashlib
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from pydantic import ValidationError
from sqlalchemy import Connection, desc, insert, select

from foreshock.server.models import AuditRow
from foreshock.server.store.database import lock_log
from foreshock.server.store.schema import audit

GENESIS: Final = "0" * 64


def append(
    connection: Connection,
    *,
    actor: str,
    action: str,
    run: str | None = None,
    command: str | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Append a row in the caller's transaction: it stands if and only if what it tells of stands."""
    lock_log(connection)
    last = connection.execute(select(audit.c.sequence, audit.c.hash).order_by(desc(audit.c.sequence)).limit(1)).first()
    row = AuditRow(
        sequence=last.sequence + 1 if last else 1,
        unix_seconds=time.time(),
        actor=actor[:160],
        action=action,
        run=run,
        command=command,
        details=details or {},
        previous_hash=last.hash if last else GENESIS,
        hash="",
    )
    row.hash = row_hash(row)
    values = row.model_dump(exclude={"details"})
    connection.execute(insert(audit).values(**values, details=_canonical(row.details)))


def row_hash(row: AuditRow) -> str:
    """SHA-256 over the previous hash and everything else in the row."""
    return hashlib.sha256(_canonical(row.model_dump(exclude={"hash"})).encode()).hexdigest()


def intact(rows: Sequence[AuditRow]) -> bool:
    """True when the rows, newest first, hash to what they say and follow one another."""
    linked = all(
        newer.previous_hash == older.hash and newer.sequence == older.sequence + 1 for newer, older in pairwise(rows)
    )
    return linked and all(row.hash == row_hash(row) for row in rows)


def page(connection: Connection, before: int | None, limit: int) -> list[AuditRow]:
    """Rows, newest first."""
    query = select(audit).order_by(desc(audit.c.sequence)).limit(limit)
    if before is not None:
        query = query.where(audit.c.sequence < before)
    rows = connection.execute(query).mappings()
    return [AuditRow.model_validate({**row, "details": json.loads(row["details"])}) for row in rows]


def after(connection: Connection, sequence: int, limit: int) -> list[AuditRow]:
    """Rows that follow this one, oldest first."""
    query = select(audit).where(audit.c.sequence > sequence).order_by(audit.c.sequence).limit(limit)
    rows = connection.execute(query).mappings()
    return [AuditRow.model_validate({**row, "details": json.loads(row["details"])}) for row in rows]


def read_line(line: bytes) -> AuditRow:
    """A row of an export. Raises BrokenChainError where it is none."""
    try:
        return AuditRow.model_validate_json(line)
    except ValidationError:
        raise BrokenChainError(f"this is no row of an audit trail: {line[:60]!r}") from None


class BrokenChainError(ValueError):
    """The audit trail was changed; the message names the first row that does not follow."""


class Chain:
    """Follows the trail, oldest row first, from its beginning or from a row that is known."""

    def __init__(self, last: AuditRow | None = None) -> None:
        self.sequence, self.hash = (last.sequence, last.hash) if last else (0, GENESIS)

    def stands(self, row: AuditRow | None) -> None:
        """Compare the last row that was taken with what stands in its place. Raises BrokenChainError where it differs.

        Otherwise nothing would show that the newest rows were rewritten or cut off, until others follow them.
        """
        if row is None:
            raise BrokenChainError(
                f"the audit trail ends before row {self.sequence}, which was exported: rows were taken away, or an "
                "older backup was restored; keep this file and begin a new file"
            )
        if (row.sequence, row.hash, row_hash(row)) != (self.sequence, self.hash, self.hash):
            raise BrokenChainError(f"the audit trail is broken: row {self.sequence} was changed after it was exported")

    def follow(self, row: AuditRow) -> None:
        """Take the next row. Raises BrokenChainError when it is not the one that followed."""
        if row.sequence != self.sequence + 1:
            raise BrokenChainError(
                f"the audit trail is broken: row {self.sequence + 1} is missing before {row.sequence}"
            )
        if row.previous_hash != self.hash:
            raise BrokenChainError(f"the audit trail is broken: row {row.sequence} follows another one")
        if row.hash != row_hash(row):
            raise BrokenChainError(f"the audit trail is broken: row {row.sequence} was changed after it was written")
        self.sequence, self.hash = row.sequence, row.hash


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
