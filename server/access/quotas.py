"""What one token may take of what all share: batches a second, runs and bytes in the store, series in /metrics.

Runs and bytes are counted in the store, in the transaction that stores the batch, so that they hold on every replica
and after a restart, and fall when retention deletes a run. They are read again once a second: what is under way
meanwhile may pass a limit by that much.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

import structlog
from sqlalchemy import desc, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.datastructures import Headers

from foreshock.server.access.auth import Caller
from foreshock.server.access.limits import Buckets, length_of, retry_after
from foreshock.server.access.problems import ProblemError
from foreshock.server.counters import Counters
from foreshock.server.store.database import Store
from foreshock.server.store.schema import runs, usage

log = structlog.get_logger()
READ_AGAIN_SECONDS: Final = 1.0
_COME_BACK_SECONDS: Final = 60.0
"""Where a person or retention must make room, a client that asks more often learns nothing."""


class _Used:
    """What a token has in the store, as it was read, and what was let in since."""

    def __init__(self, runs_of_it: set[str], stored_bytes: int) -> None:
        self.runs, self.stored_bytes, self.read_at = runs_of_it, stored_bytes, time.monotonic()


class Quotas:
    """Refuses with 429 what is beyond a token's quota; the agent keeps it in its spool and tries again."""

    def __init__(self, store: Store, counters: Counters) -> None:
        self._store, self._counters = store, counters
        self._logged = Buckets(1 / 60)
        self._paces: dict[tuple[str, float], Buckets] = {}
        self._used: dict[str, _Used] = {}

    async def admit(self, caller: Caller, headers: Headers) -> None:
        """Before a batch with these headers is read. Raises ProblemError 429 when its token has no more to spend."""
        quota = caller.quota
        if (rate := quota.batches_per_second) is not None:
            buckets = self._paces.setdefault((caller.name, rate), Buckets(rate))
            if (wait := buckets.take("")) > 0:
                raise self._refusal(caller, f"sends more than {rate:g} batches a second; slow down", wait)
        if quota.stored_bytes is not None:
            used, size = await self._used_by(caller), length_of(headers)
            if used.stored_bytes + size > quota.stored_bytes:
                raise self._refusal(
                    caller,
                    f"has {used.stored_bytes} of {quota.stored_bytes} bytes in the store; room comes back when "
                    "old runs are deleted, or raise its quota stored_bytes",
                )
            used.stored_bytes += size

    async def admit_run(self, caller: Caller, run: str) -> None:
        """Before a batch of this run is stored. Raises ProblemError 429 when the token may begin no further run."""
        if caller.quota.runs is None:
            return
        used = await self._used_by(caller)
        if run not in used.runs and len(used.runs) >= caller.quota.runs:
            raise self._refusal(
                caller,
                f"has {len(used.runs)} of {caller.quota.runs} runs in the store and may begin no other; room comes "
                "back when old runs are deleted, or raise its quota runs",
            )
        used.runs.add(run)

    async def _used_by(self, caller: Caller) -> _Used:
        used = self._used.get(caller.name)
        if used is None or time.monotonic() - used.read_at >= READ_AGAIN_SECONDS:
            async with self._store.read() as connection:
                query = select(runs.c.name, usage.c.stored_bytes).join(runs).where(usage.c.token == caller.name)
                rows = (await connection.execute(query)).all()
            used = self._used[caller.name] = _Used({row.name for row in rows}, sum(row.stored_bytes for row in rows))
        return used

    def _refusal(self, caller: Caller, why: str, wait: float = _COME_BACK_SECONDS) -> ProblemError:
        self._counters.batches["quota"] += 1
        error = ProblemError(429, f"The token {caller.name} {why}.", headers=retry_after(wait))
        if self._logged.take(caller.name) == 0:  # once a minute; the counter says how often
            log.warning("batch beyond a quota", why=error.detail)
        return error


async def count(connection: AsyncConnection, stored: Iterable[tuple[str, int, int]]) -> None:
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
    await connection.execute(statement, values)


async def owners(connection: AsyncConnection) -> dict[str, str]:
    """By run, the token that has stored the most of it."""
    query = select(runs.c.name, usage.c.token).join(runs).order_by(usage.c.stored_bytes, desc(usage.c.token))
    return {row.name: row.token for row in await connection.execute(query)}
