"""Authentication and authorisation. Closed by default: a request reaches a route only if a rule allows it.

Without a token the service listens only on loopback. Then Host and Origin must be loopback names, so that a foreign web
page cannot reach it by DNS rebinding, and bodies must be JSON, which a foreign page can send only after a preflight.
With tokens every path except the public ones needs one, as a bearer token or as the page's session cookie; a change
that is authorised by the cookie also needs the CSRF token.
"""

import hashlib
import hmac
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

import structlog
from fastapi import Depends, Request
from sqlalchemy import Connection, delete, or_, select
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from foreshock.server.limits import (
    BATCHES,
    LOGIN,
    MOST_BYTES,
    ORDER_BYTES,
    Buckets,
    ConcurrencyLimit,
    at_most,
    network_of,
    retry_after,
)
from foreshock.server.logs import Counters
from foreshock.server.problems import ProblemError, answer_to
from foreshock.server.settings import ALL_SCOPES, Scope, Settings, Token
from foreshock.server.store.database import Store
from foreshock.server.store.schema import sessions

_COOKIE_BYTES: Final = 32
_COOKIE_LENGTH: Final = 43

log = structlog.get_logger()
COOKIE: Final = "foreshock_session"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
HEALTH: Final = "/healthz"
_PROBES: Final = (HEALTH, "/readyz")
_OPEN_PAGES: Final = ("/", *_PROBES, "/v1/session", "/favicon.ico")
_OPEN: Final = {(method, path) for path in _OPEN_PAGES for method in ("GET", "HEAD")} | {("POST", LOGIN)}
"""Requests that need no token, in addition to the page's files under /assets/."""
_SECURITY_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_NO_STORE: Final = (b"cache-control", b"no-store")
"""Sent with every response except the page's files, so that browsers do not store data of a session."""
_RAW_SECURITY_HEADERS: Final = [(name.encode(), value.encode()) for name, value in _SECURITY_HEADERS.items()]


@dataclass(frozen=True)
class Caller:
    """The sender of a request, and its permissions."""

    name: str
    scopes: frozenset[str]
    run_prefix: str = ""
    csrf_token: str | None = None

    def may(self, scope: Scope) -> bool:
        """Whether the caller has the scope; admin includes all scopes."""
        return scope in self.scopes or "admin" in self.scopes


ANYONE: Final = Caller("local", frozenset(ALL_SCOPES))
NOBODY: Final = Caller("nobody", frozenset())


class AuthMiddleware:
    """ASGI middleware around the whole application, including static files and unknown paths.

    Posted batches go to `batches` directly: as a route of the framework, a batch takes 0.2 processor milliseconds more
    (0.59 to 0.88 without, 0.85 to 1.09 with; `foreshock bench ingest`, three rounds in turn).
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        keyring: "Keyring",
        shares: ConcurrencyLimit,
        counters: Counters,
        batches: ASGIApp,
    ) -> None:
        self.batches = batches
        self.app, self.keyring, self.shares, self.counters = app, keyring, shares, counters
        self.max_bytes = settings.max_body_bytes
        self.hosts = frozenset(map(_host_name, settings.allowed_hosts))
        # The login limit is per network: with a shared limit, guesses from many networks would lock out everybody.
        self._guesses = Buckets(0.5, burst=10)
        self._logged, self._lines = Buckets(1 / 60), Buckets(1.0, burst=60)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                self._note(scope, message["status"])
                given = message["headers"] = list(message["headers"])
                names = {name for name, _ in given}
                given.extend(header for header in _RAW_SECURITY_HEADERS if header[0] not in names)
                if b"cache-control" not in names and not scope["path"].startswith("/assets/"):
                    given.append(_NO_STORE)
            await send(message)

        headers, path = Headers(scope=scope), scope["path"]
        with ExitStack() as in_flight:
            try:
                caller = scope.setdefault("state", {})["caller"] = await self._admit(scope, headers)
                if path not in _PROBES:
                    share = self.shares.take(caller.name, headers, known=caller is not NOBODY)
                    in_flight.enter_context(share)
                receive = at_most(min(MOST_BYTES.get(path, ORDER_BYTES), self.max_bytes), headers, receive)
                app = self.batches if path == BATCHES and scope["method"] == "POST" else self.app
                await app(scope, receive, send_with_headers)
            except ClientDisconnect:
                pass  # while sending its body, so no response can be sent
            except Exception as error:
                if begun:
                    raise
                await answer_to(error, path)(scope, receive, send_with_headers)

    def _note(self, scope: AsgiScope, status: int) -> None:
        """Count and log a refused token or login."""
        is_login = scope["path"] == LOGIN
        what = "throttled login" if is_login and status == 429 else "login" if is_login else "token"
        shown = is_login or any(name == b"authorization" for name, _ in scope["headers"])
        if (status != 401 and what != "throttled login") or not shown:
            return
        self.counters.refusals[what] += 1
        if self._logged.take((what, _address(scope))) == 0 and self._lines.take(what) == 0:
            log.warning(f"{what} refused", client=_address(scope), path=scope["path"][:200])

    async def _admit(self, scope: AsgiScope, headers: Headers) -> Caller:
        method, path = scope["method"], scope["path"]
        self._check_host(headers)
        if "\x00" in path or b"%00" in scope["query_string"]:
            raise ProblemError(422, "The address contains a NUL character, which is not allowed; remove it.")
        if headers.get("content-encoding", "identity") != "identity":
            raise ProblemError(415, "Compressed bodies are not supported; remove Content-Encoding.")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ProblemError(415, "Only application/json is supported; set Content-Type.")
        if not self.keyring.tokens:
            return ANYONE
        if (method, path) == ("POST", LOGIN) and (wait := self._guesses.take(_address(scope))):
            raise ProblemError(429, "Too many login attempts; wait.", headers=retry_after(wait))
        caller = await self.keyring.caller(headers)
        if caller.csrf_token and method not in _SAFE_METHODS and path != LOGIN:
            given = headers.get("x-csrf-token", "")
            if not hmac.compare_digest(given.encode(), caller.csrf_token.encode()):
                raise ProblemError(403, "Changes need the header X-CSRF-Token in addition to the session cookie.")
        if caller is NOBODY and (method, path) not in _OPEN and not path.startswith("/assets/"):
            raise ProblemError(
                401,
                "The service does not know the token: it is misspelt, was withdrawn, or belongs to another service."
                if "authorization" in headers
                else "This service needs a token: send Authorization: Bearer TOKEN, or log in on the page.",
                headers={"www-authenticate": "Bearer"},
            )
        return caller

    def _check_host(self, headers: Headers) -> None:
        if not self.hosts and self.keyring.tokens:
            return
        host = _host_name(headers.get("host", ""))
        allowed = _LOOPBACK_NAMES if host in _LOOPBACK_NAMES else self.hosts  # for probes on the same machine
        if host not in allowed:
            raise ProblemError(403, "This Host name is not one of the service's (FORESHOCK_ALLOWED_HOSTS).")
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) not in allowed:
            raise ProblemError(403, "Requests from other origins are refused.")


class Keyring:
    """The tokens and the sessions of logged-in browsers. Only hashes are stored."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.tokens, self._store, self._seconds = settings.all_tokens, store, settings.session_seconds

    async def caller(self, headers: Headers) -> Caller:
        """Return the caller that these headers authenticate, or NOBODY."""
        values = headers.getlist("authorization")
        if len(values) == 1 and values[0][:7].lower() == "bearer ":
            return _as_caller(self._token_with(_hash(values[0][7:].strip())))
        cookie = cookie_of(headers)
        return await self._session(cookie) if cookie and not values else NOBODY

    def _token_with(self, digest: str) -> Token | None:
        found = None
        for token in self.tokens:  # compares with every token, so that the duration reveals nothing
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    async def login(self, secret: str) -> tuple[str, Caller] | None:
        """Start a session for a token's secret and return its cookie and caller; None if the secret is wrong."""
        digest = _hash(secret)
        token = self._token_with(digest)
        if token is None:
            return None
        cookie, now = secrets.token_urlsafe(_COOKIE_BYTES), time.time()

        def begin(connection: Connection) -> None:
            connection.execute(delete(sessions).where(sessions.c.until < now))
            connection.execute(sessions.insert().values(hash=_hash(cookie), token=digest, until=now + self._seconds))

        await self._store.write(begin)
        return cookie, _as_caller(token, _csrf_token(cookie))

    async def _session(self, cookie: str) -> Caller:
        if len(cookie) != _COOKIE_LENGTH or not cookie.isascii():
            return NOBODY
        query = select(sessions.c.token).where(sessions.c.hash == _hash(cookie), sessions.c.until >= time.time())
        digest: str | None = await self._store.read(lambda connection: connection.execute(query).scalar())
        return NOBODY if digest is None else _as_caller(self._token_with(digest), _csrf_token(cookie))

    async def logout(self, caller: Caller, cookie: str | None, everywhere: bool) -> None:
        """End the session of the cookie, and with `everywhere` all sessions of the caller's token."""
        own = [token.sha256 for token in self.tokens if everywhere and token.name == caller.name]
        ended = delete(sessions).where(or_(sessions.c.hash == _hash(cookie or ""), sessions.c.token.in_(own)))
        await self._store.write(lambda connection: connection.execute(ended))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def cookie_of(headers: Headers) -> str | None:
    """Return the page's session cookie, if there is one."""
    return cookie_parser(headers.get("cookie", "")).get(COOKIE)


def _csrf_token(cookie: str) -> str:
    return hmac.new(cookie.encode(), b"csrf", hashlib.sha256).hexdigest()


def _as_caller(token: Token | None, csrf_token: str | None = None) -> Caller:
    if token is None:
        return NOBODY
    return Caller(token.name, frozenset(token.scopes), token.run_prefix, csrf_token)


def _address(scope: AsgiScope) -> str:
    """Return a caller name for a request without a token, from its network."""
    return f"from {network_of((scope.get('client') or ('',))[0])}"


def _host_name(netloc: str) -> str:
    name = netloc.rsplit(":", 1)[0] if netloc.rpartition(":")[2].isdigit() else netloc
    return name.lower()


def _host_of(origin: str) -> str | None:
    try:
        return _host_name(urlsplit(origin).netloc)
    except ValueError:
        return None


def caller_of(request: Request) -> Caller:
    """Return the caller of this request."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


class Needs:
    """A FastAPI dependency that requires `scope`, and access to the run in the path, if there is one."""

    def __init__(self, scope: Scope) -> None:
        self.scope: Scope = scope

    async def __call__(self, request: Request) -> Caller:  # async, because FastAPI runs others in a thread pool
        caller = caller_of(request)
        check_scope(caller, self.scope)
        run = request.path_params.get("run")
        if run is not None:
            check_run(caller, run)
        return caller


Reader = Annotated[Caller, Depends(Needs("read"))]
Actor = Annotated[Caller, Depends(Needs("act"))]
Deleter = Annotated[Caller, Depends(Needs("delete"))]


def check_scope(caller: Caller, scope: Scope) -> None:
    """Raise ProblemError if the caller's token lacks the scope."""
    if not caller.may(scope):
        raise ProblemError(403, f"The token {caller.name} lacks the scope {scope!r}.")


def check_run(caller: Caller, run: str) -> None:
    """Raise ProblemError if the caller's token has no access to the run."""
    if not run.startswith(caller.run_prefix):
        raise ProblemError(403, f"The token {caller.name} has no access to run {run[:128]}.")
