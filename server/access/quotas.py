"""How much of the store one token may fill, so that it leaves room to the others.

Bytes are counted in the store, in the transaction that stores the batch, so that the bound holds on every replica and
after a restart, and falls when a run is deleted. They are read again once a second: what is under way meanwhile may
pass the bound by that much.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

import structlog
from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite
from starlette.datastructures import Headers

from foreshock.server.access.limits import Buckets, length_of, retry_after
from foreshock.server.access.problems import ProblemError
from foreshock.server.counters import Counters
from foreshock.server.store.database import Store
from foreshock.server.store.schema import usage

log = structlog.get_logger()
READ_AGAIN_SECONDS: Final = 1.0
_COME_BACK_SECONDS: Final = 60.0
"""Where a person or retention must make room, a client that asks more often learns nothing."""


class Quotas:
    """Refuses with 429 what is beyond `most` bytes of one token; the agent keeps it in its spool and tries again."""

    def __init__(self, store: Store, counters: Counters, most: int | None) -> None:
        self._store, self._counters, self._most = store, counters, most
        self._logged = Buckets(1 / 60)
        self._used: dict[str, tuple[float, int]] = {}
        """By token when its bytes were read, and how many there were with those that were let in since."""

    async def admit(self, token: str, headers: Headers) -> None:
        """Before a batch with these headers is read. Raises ProblemError 429 when the token has filled its part."""
        if self._most is None or not token:
            return
        read_at, used = self._used.get(token, (-READ_AGAIN_SECONDS, 0))
        if time.monotonic() - read_at >= READ_AGAIN_SECONDS:
            query = select(func.coalesce(func.sum(usage.c.stored_bytes), 0)).where(usage.c.token == token)
            read_at = time.monotonic()
            used = int(await self._store.read(lambda connection: connection.execute(query).scalar_one()))
        admitted = used + length_of(headers) <= self._most
        self._used[token] = read_at, used + length_of(headers) * admitted
        if admitted:
            return
        self._counters.batches["quota"] += 1
        why = (
            f"The token {token} has {used} of {self._most} bytes in the store; room comes back when old runs are "
            "deleted, or raise FORESHOCK_TOKEN_STORED_BYTES."
        )
        if self._logged.take(token) == 0:  # once a minute; the counter says how often
            log.warning("batch beyond a quota", why=why)
        raise ProblemError(429, why, headers=retry_after(_COME_BACK_SECONDS))


def count(connection: Connection, stored: Iterable[tuple[str, int, int]]) -> None:
    """Count (token, run id, bytes) of batches in the transaction that stores them, which holds their runs."""
    sizes: Counter[tuple[int, str]] = Counter()
    for token, run_id, size in stored:
        sizes[run_id, token] += size
    if not sizes:
        return
    insert = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(usage)
    added = {"stored_bytes": usage.c.stored_bytes + insert.excluded.stored_bytes}
    statement = insert.on_conflict_do_update(index_elements=[usage.c.run_id, usage.c.token], set_=added)
    values = [{"run_id": run_id, "token": token, "stored_bytes": n} for (run_id, token), n in sorted(sizes.items())]
    connection.execute(statement, values)
