"""What one caller may take at most: batches and attempts a second, requests and bytes at once, connections.

Who is slow, idle or silent makes room for others, and health is answered all the same. A deadline stands over the
headers of each request, over its body, and over an answer that nobody takes. Beyond a limit of connections the one that
has waited longest without a request is closed, of the address that has most of those; a few more are let in when all of
them are at work, and are answered at /healthz alone.
"""

import asyncio
import math
import random
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, ClassVar, Final, cast

import structlog
from starlette.datastructures import Headers
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreshock.server.problems import ProblemError
from foreshock.server.settings import Settings

_MAX_BUCKETS: Final = 10_000
_STRANGERS_BYTES: Final = 64 * 2**10
LOGIN: Final = "/v1/login"
"""Where bodies are read of those who have shown no token."""
_ORDER_BYTES: Final = 2**20
"""Orders and deliveries of alerts are far smaller; batches alone may be large."""
SPREAD: Final = random.SystemRandom()
"""Parts clients that would come back together."""


class Buckets:
    """One bucket per key, filled at `rate` per second up to `burst` (two seconds' worth). The oldest are forgotten."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate) if burst is None else burst
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable, now: float | None = None) -> float:
        """Take one; 0 when there was one, else the seconds until there is."""
        now = time.monotonic() if now is None else now
        level, since = self._levels.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._rate)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate
        self._levels[key] = (level - 1 if wait == 0 else level, now)
        if len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)
        return wait


def retry_after(seconds: float) -> dict[str, str]:
    """A Retry-After header, spread over twice the time so that clients do not come back together."""
    return {"retry-after": str(max(1, math.ceil(seconds * SPREAD.uniform(1, 2))))}


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Whom an address stands for: an IPv6 network of 64 bits, which one host has whole, or one IPv4 address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or ip_network((int(parsed), 64), strict=False))
    return str(parsed)


def length_of(headers: Headers) -> int:
    """Bytes of the body that these headers announce, 0 where they announce none."""
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0


class ConcurrencyLimit:
    """How many requests each caller may have in flight, so that requests that never end leave room for the others.

    A token gets half of the requests that the service takes, all callers without one a quarter together. Each gets
    `body_bytes` of bodies, by what their headers announce: bodies are in memory until they are read.
    """

    def __init__(self, requests: int, body_bytes: int, max_bytes: int) -> None:
        self._of_token = max(1, requests // 2), max_bytes
        self._of_strangers = max(1, requests // 4), min(max_bytes, _STRANGERS_BYTES)
        self._body_bytes = body_bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def take(self, who: str, headers: Headers, *, known: bool) -> Iterator[None]:
        """While a request of `who` with these headers is in flight. Raises ProblemError 429 beyond its share.

        One body is always taken.
        """
        who, (most, largest) = (who, self._of_token) if known else ("", self._of_strangers)
        size = largest if "transfer-encoding" in headers else min(length_of(headers), largest)
        held = self._bytes[who]
        if self._requests[who] >= most or (size and held and held + size > self._body_bytes):
            raise ProblemError(
                429,
                "Too many concurrent requests from this client. Retry after the time in Retry-After.",
                headers=retry_after(1.0),
            )
        self._requests[who] += 1
        self._bytes[who] += size
        try:
            yield
        finally:
            self._requests[who] -= 1
            self._bytes[who] -= size


class BodyLimit:
    """ASGI middleware: larger bodies get a 413 before they are read. Who needs no token sends little.

    Batches, which are larger than all else, go past it (ingest.endpoint).
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._most = RequestBodyLimitMiddleware(app, min(max_bytes, _ORDER_BYTES))
        self._strangers = RequestBodyLimitMiddleware(app, min(max_bytes, _STRANGERS_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._strangers if scope.get("path") == LOGIN else self._most
        await limit(scope, receive, send)


log = structlog.get_logger()
_RESERVE: Final = 64
_OTHER_FILES: Final = 128
"""Open files beside connections: the store has up to three for each of its nine, and as many for what it sorts."""
_HEADER_BYTES: Final = 65_536
_STATUS_LINE: Final = b"HTTP/1.1 "
_PIPELINED: Final = 16
"""Requests that may come before the one ahead of them is answered. Few clients send any so; one packet can hold
thousands, each of which takes some kilobytes.
"""
_LOGIN_SECONDS: Final = 5.0
_UNREAD_SECONDS: Final = 60.0
"""How long an answer may lie in the connection's buffer before its client is taken for gone."""


class Whole:
    """A transport that sends the head of an answer with its body, at once where that comes at once.

    Each packet is a system call, and wakes the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""
        self.is_closing = transport.is_closing  # asked at every request

    def write(self, data: bytes) -> None:
        """Send, after the head that waits; a head waits for what comes in the same turn of the loop.

        Nothing is sent once the connection ends: many answers may be under way on it, and each would be an error.
        """
        head, self._head = self._head, b""
        if self.is_closing():
            return
        if not head and data.startswith(_STATUS_LINE):
            self._head = data
            self._loop.call_soon(self.write, b"")
        elif data := head + data:
            self._transport.write(data)

    def close(self) -> None:
        """Close when all is sent."""
        self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Connection(HttpToolsProtocol):
    """uvicorn's, with deadlines. `bounded` makes one for a service's settings."""

    most: ClassVar[int]
    header_seconds: ClassVar[float]
    body_seconds: ClassVar[float]
    idle: ClassVar[dict["_Connection", None]]
    """Connections without a request in progress, the one that has waited longest first."""

    _address = ""
    _due: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def _end_in(self, seconds: float | None) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Whole(transport, self.loop)))
        self._address = self.client[0] if self.client else ""
        self.idle[self] = None
        self._end_in(self.header_seconds)
        if len(self.connections) > self.most:
            busiest = Counter(one._address for one in self.idle).most_common(1)[0][0]
            longest = next(one for one in self.idle if one._address == busiest)
            if longest is not self or len(self.connections) > self.most + _RESERVE:
                longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_in(None)
        self.resume_writing()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        at_rest = self.cycle is None or self.cycle.response_complete
        if at_rest and self._due is None and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._end_in(self.header_seconds)  # bytes that begin no request

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _PIPELINED:
            raise ValueError("more requests wait on this connection than the service takes")
        super().on_message_begin()
        self._header_bytes = 0
        self._end_in(self.header_seconds)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _HEADER_BYTES:
            raise ValueError("the headers are longer than the service takes")

    def on_headers_complete(self) -> None:
        self.idle.pop(self, None)
        self._end_in(self.body_seconds)
        super().on_headers_complete()
        if self.scope["path"] == LOGIN:  # the one place where a body is read of those who have shown no token
            self._end_in(min(self.body_seconds, _LOGIN_SECONDS))

    def on_message_complete(self) -> None:
        self._end_in(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()


def bounded(settings: Settings) -> type[_Connection]:
    """The protocol of one service's connections."""
    limits: dict[str, Any] = {
        "most": _within_open_files(settings.connections),
        "header_seconds": settings.header_seconds,
        "body_seconds": settings.body_seconds,
        "idle": {},
    }
    return type("Connection", (_Connection,), limits)


def _within_open_files(connections: int) -> int:
    """So many connections, or as many as the process may have open files for. Its limit is raised as far as it goes.

    Without a file left no connection is accepted, and the rule that makes room for new ones is never asked.
    """
    wanted = connections + _RESERVE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OverflowError, OSError):  # some systems allow less than their hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    fewer = max(1, soft - _RESERVE - _OTHER_FILES)
    log.warning(
        "fewer connections than FORESHOCK_CONNECTIONS: the process may not open more files; raise LimitNOFILE of its "
        "unit, or `ulimit -Hn`",
        connections=fewer,
        wanted=connections,
        open_files=soft,
    )
    return fewer
