"""Runs that have been silent for long enough are deleted, a little at a time, while ingest goes on."""

from typing import Final

from sqlalchemy import delete, select

from foreshock.server.store.database import Store
from foreshock.server.store.schema import runs, samples

_SAMPLES_AT_ONCE: Final = 2000


async def delete_old_runs(store: Store, retention_seconds: float | None, now: float) -> int:
    """Delete runs last heard from more than `retention_seconds` ago; how many. None keeps everything."""
    if retention_seconds is None:
        return 0
    old = runs.c.last_seen < now - retention_seconds
    async with store.read() as connection:
        ids = (await connection.execute(select(runs.c.id).where(old))).scalars().all()
    deleted = 0
    for run_id in ids:
        some = select(samples.c.id).where(samples.c.run_id == run_id).limit(_SAMPLES_AT_ONCE)
        while True:
            async with store.write() as connection:
                if (await connection.execute(delete(samples).where(samples.c.id.in_(some)))).rowcount == 0:
                    # A run that was heard from meanwhile stays.
                    deleted += (await connection.execute(delete(runs).where(runs.c.id == run_id, old))).rowcount
                    break
    return deleted
