"""Tokens are replaced without a restart: the files that they came from are read again every few seconds."""

import asyncio
from typing import Final

import structlog
from pydantic import SecretStr, TypeAdapter, ValidationError

from foreshock.server.access.auth import Keyring
from foreshock.server.pause import pause
from foreshock.server.settings import Settings, Token, secret_in_file, tokens_of
from foreshock.server.store import audit
from foreshock.server.store.database import Store

log = structlog.get_logger()
LOOK_SECONDS: Final = 2.0
_TOKENS: Final = TypeAdapter(tuple[Token, ...])


class Rotation:
    """Keeps a keyring as the files of FORESHOCK_TOKEN_FILE and FORESHOCK_TOKENS_FILE say.

    What cannot be used changes nothing: files that are gone, malformed or without any token leave the tokens as they
    were, with one line in the log.
    """

    def __init__(self, settings: Settings, keyring: Keyring, store: Store) -> None:
        self._keyring, self._store = keyring, store
        self._token, self._tokens = settings.token, settings.tokens
        # A variable wins over its file: only what came from the file follows it.
        self._follows_token = _token() is not None and _token() == settings.token
        self._follows_tokens = _tokens() is not None and _tokens() == settings.tokens
        self._said = ""

    async def run(self, closing: asyncio.Event) -> None:
        """Look until the service goes down; at once over when the tokens came from no file."""
        while (self._follows_token or self._follows_tokens) and not closing.is_set():
            await pause(closing, LOOK_SECONDS)
            if closing.is_set():
                return
            try:
                await self.look()
            except Exception:
                log.exception("the token files could not be looked at; they are looked at again")

    async def look(self) -> None:
        """Take the tokens that the files hold now."""
        try:
            found = await asyncio.to_thread(self._read)
        except ValidationError as error:  # its own words would show what was given
            where = ".".join(map(str, error.errors(include_input=False)[0]["loc"]))
            return self._say(f"FORESHOCK_TOKENS_FILE is malformed at {where or 'its beginning'}")
        except ValueError as error:
            return self._say(str(error))
        self._said = ""
        before = self._keyring.tokens
        if found == before:
            return
        old, new = {token.name: token for token in before}, {token.name: token for token in found}
        details = {
            "added": sorted(new.keys() - old.keys()),
            "removed": sorted(old.keys() - new.keys()),
            "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
        }
        self._keyring.tokens = found
        log.info("tokens changed", **details)
        async with self._store.write() as connection:
            await audit.append(connection, actor="service", action="tokens changed", details=details)

    def _read(self) -> tuple[Token, ...]:
        token = _token() if self._follows_token else self._token
        tokens = _tokens() if self._follows_tokens else self._tokens
        found = tokens_of(token, tokens or ())
        if not found:
            raise ValueError("the files hold no token, which would open the service to everybody")
        return found

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            log.error("the token files cannot be used; the tokens stay as they were", why=why)


def _token() -> SecretStr | None:
    text = secret_in_file("token")
    return None if text is None else SecretStr(text)


def _tokens() -> tuple[Token, ...] | None:
    text = secret_in_file("tokens")
    return None if text is None else _TOKENS.validate_json(text)
