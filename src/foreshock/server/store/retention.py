"""Deletes old runs in small transactions, so that ingest continues in between.

The wall clock may jump, so one reading is not enough: a run is deleted only if every sweep over an hour of the
monotonic clock (or a tenth of a shorter retention) finds it too old. A live run is heard in that time, and stays.
"""

import time
from typing import Final

import structlog
from sqlalchemy import Connection, delete, select

from foreshock.server.store.database import Store, Work, lock_runs
from foreshock.server.store.schema import runs, samples

log = structlog.get_logger()
_SAMPLES_AT_ONCE: Final = 2000
_RUNS_AT_ONCE: Final = 10
_CONFIRMED_SECONDS: Final = 3600.0


class Retention:
    """Deletes runs last heard from more than `seconds` ago; None keeps everything."""

    def __init__(self, store: Store, seconds: float | None) -> None:
        self._store, self._seconds = store, seconds
        self._old_since: dict[int, float] = {}
        """By run id: the monotonic time since which every sweep has found the run too old."""

    async def sweep(self, now: float | None = None, monotonic: float | None = None) -> int:
        """Delete at most ten runs that have been too old for long enough, and return their number."""
        if self._seconds is None:
            return 0
        now, monotonic = now or time.time(), time.monotonic() if monotonic is None else monotonic
        query = select(runs.c.id, runs.c.name, runs.c.last_seen).where(runs.c.last_seen < now - self._seconds)
        found = {row.id: row for row in await self._store.read(lambda connection: connection.execute(query).all())}
        self._old_since = {run_id: self._old_since.get(run_id, monotonic) for run_id in found}
        confirmed = min(_CONFIRMED_SECONDS, self._seconds / 10)
        due = [run_id for run_id, since in self._old_since.items() if monotonic - since >= confirmed][:_RUNS_AT_ONCE]
        deleted = [run_id for run_id in due if await delete_run(self._store, run_id, now - self._seconds)]
        if deleted:
            names = [found[run_id].name for run_id in deleted]
            log.info("old runs deleted", runs=names, waiting=len(found) - len(deleted), silent_seconds=self._seconds)
        return len(deleted)


async def delete_run(store: Store, run_id: int, before: float, also: Work[None] | None = None) -> bool:
    """Delete a run last heard from before `before`, in small transactions; False if it was heard from since, and stays.

    also: work for the transaction that deletes the run itself.
    """
    some = select(samples.c.id).where(samples.c.run_id == run_id).limit(_SAMPLES_AT_ONCE)
    old = runs.c.id == run_id, runs.c.last_seen < before

    def delete_some(connection: Connection) -> bool | None:
        """Whether the run is gone; None while samples of it are left."""
        lock_runs(connection, [run_id])
        if connection.execute(select(runs.c.id).where(*old)).first() is None:
            return False
        if connection.execute(delete(samples).where(samples.c.id.in_(some))).rowcount:
            return None
        gone = bool(connection.execute(delete(runs).where(*old)).rowcount)
        if gone and also is not None:
            also(connection)
        return gone

    while (gone := await store.write(delete_some)) is None:
        pass
    return gone
