"""Can a batch be stored now? Found out by storing something, as the writer does, within a deadline."""

import asyncio
import shutil
import time
from typing import Final

from sqlalchemy import Connection, delete

from foreshock.server.settings import Settings
from foreshock.server.store.database import Store, insert_or_ignore
from foreshock.server.store.schema import service_state

DEADLINE_SECONDS: Final = 5.0
_SAME_ANSWER_SECONDS: Final = 1.0
_KEY: Final = "readiness"


class Readiness:
    """Tries the store, at most once a second however many ask."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._room = store, settings.max_body_bytes
        self._asking = asyncio.Lock()
        self._found = "never tried"
        self._found_at = -float("inf")

    async def of_store(self) -> str:
        """ "ok", or what is wrong with the store."""
        async with self._asking:
            if time.monotonic() - self._found_at >= _SAME_ANSWER_SECONDS:
                self._found = await self._tried()
                self._found_at = time.monotonic()
        return self._found

    async def _tried(self) -> str:
        path = self._store.path
        try:
            if path is not None and not path.exists():
                return "its file is gone"
            if path is not None and shutil.disk_usage(path.parent).free < self._room:
                return "its disk is full"
            async with asyncio.timeout(DEADLINE_SECONDS):
                await self._store.write(_try_to_write)
        except TimeoutError:
            return f"no write within {DEADLINE_SECONDS:.0f} s"
        except Exception as error:
            return type(error).__name__
        return "ok"


def _try_to_write(connection: Connection) -> None:
    connection.execute(delete(service_state).where(service_state.c.key == _KEY))
    connection.execute(insert_or_ignore(connection, service_state), [{"key": _KEY, "value": time.time()}])
