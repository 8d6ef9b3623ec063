"""The page's sessions: a random cookie each, whose hash is kept in the store: replicas share them, and they can end."""

import hashlib
import secrets
import time
from typing import Final

from sqlalchemy import Connection, delete, select

from foreshock.server.store.database import Store
from foreshock.server.store.schema import sessions

_COOKIE_BYTES: Final = 32
_COOKIE_LENGTH: Final = 43


class Sessions:
    """Sessions of `seconds` each."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self.seconds = store, seconds

    async def begin(self, token: str) -> str:
        """A new session of the token with this hash; its cookie. What has expired is forgotten."""
        cookie, now = secrets.token_urlsafe(_COOKIE_BYTES), time.time()

        def add(connection: Connection) -> None:
            connection.execute(delete(sessions).where(sessions.c.until < now))
            connection.execute(sessions.insert().values(hash=_hash(cookie), token=token, until=now + self.seconds))

        await self._store.write(add)
        return cookie

    async def token_of(self, cookie: str) -> str | None:
        """The hash of the token whose session has this cookie; None where no session has it."""
        if len(cookie) != _COOKIE_LENGTH or not cookie.isascii():
            return None
        query = select(sessions.c.token).where(sessions.c.hash == _hash(cookie), sessions.c.until >= time.time())
        token: str | None = await self._store.read(lambda connection: connection.execute(query).scalar())
        return token

    async def end(self, cookie: str) -> None:
        """End a session."""
        ended = delete(sessions).where(sessions.c.hash == _hash(cookie))
        await self._store.write(lambda connection: connection.execute(ended))

    async def end_all(self, token: str) -> None:
        """End every session of the token with this hash."""
        ended = delete(sessions).where(sessions.c.token == token)
        await self._store.write(lambda connection: connection.execute(ended))


def _hash(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
