"""Limits for each caller: batches and login attempts per second, concurrent requests and bytes.

A request must be complete within a deadline, and must not be sent before the previous one on its connection was
answered. All other protection against hostile connections is left to the proxy (docs/secure.md).
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
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreshock.server.problems import TOO_LARGE, ProblemError
from foreshock.server.settings import Settings

_MAX_BUCKETS: Final = 10_000
_STRANGERS_BYTES: Final = 64 * 2**10
BATCHES: Final = "/v1/batches"
LOGIN: Final = "/v1/login"
"""The only path whose request body is read without a token."""
ORDER_BYTES: Final = 2**20
"""Largest body of a path that is not in `MOST_BYTES`: orders and deliveries of alerts are far smaller."""
MOST_BYTES: Final = {LOGIN: _STRANGERS_BYTES, BATCHES: math.inf}
SPREAD: Final = random.SystemRandom()
"""Random delays, so that clients do not retry at the same moment."""


class Buckets:
    """Token buckets by key, filled at `rate` per second up to `burst` (by default two seconds' worth).

    If there are too many keys, the least recently used is dropped.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate) if burst is None else burst
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable, now: float | None = None) -> float:
        """Take one from the bucket of `key` and return 0, or return the seconds until one is available."""
        now = time.monotonic() if now is None else now
        level, since = self._levels.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._rate)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate
        self._levels[key] = (level - 1 if wait == 0 else level, now)
        if len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)
        return wait


def retry_after(seconds: float) -> dict[str, str]:
    """Return a Retry-After header of one to two times `seconds`, so that clients do not retry at the same moment."""
    return {"retry-after": str(max(1, math.ceil(seconds * SPREAD.uniform(1, 2))))}


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the unit that limits apply to: an IPv4 address, or an IPv6 /64 network, which one host may own."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or ip_network((int(parsed), 64), strict=False))
    return str(parsed)


def length_of(headers: Headers) -> int:
    """Return the body's length in bytes from Content-Length; 0 without a valid one."""
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0


class ConcurrencyLimit:
    """Limits the requests in flight of each caller, so that requests that never end leave room for other callers.

    A token may use half of the service's requests, and all callers without a token together a quarter. Each may use
    `body_bytes` for request bodies, counted by Content-Length, because bodies are in memory until they are read.
    """

    def __init__(self, requests: int, body_bytes: int, max_bytes: int) -> None:
        self._of_token = max(1, requests // 2), max_bytes
        self._of_strangers = max(1, requests // 4), min(max_bytes, _STRANGERS_BYTES)
        self._body_bytes = body_bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def take(self, who: str, headers: Headers, *, known: bool) -> Iterator[None]:
        """Count a request of `who` while it is in flight. Raises ProblemError 429 above the caller's limit.

        A single body is always accepted.
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


def at_most(size: float, headers: Headers, receive: Receive) -> Receive:
    """Wrap `receive` for a body of at most `size` bytes. A longer body raises ProblemError 413, now or on receipt."""
    if length_of(headers) > size:
        raise ProblemError(413, TOO_LARGE)
    left = size

    async def receive_some() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise ProblemError(413, TOO_LARGE)
        return message

    return receive_some


_HEAD_BYTES: Final = 65_536
_FILES: Final = 8192
"""Number of open files to request if there is no hard limit."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with a deadline for each request and a limit for the size of its headers."""

    _due: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0

    def _end_in(self, seconds: float | None) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_in(Settings.request_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_in(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_before = self._in_head
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if began_before and self._in_head else 0
        if self._head_bytes > _HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._end_in(Settings.request_seconds)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.cycle is not None and not self.cycle.response_complete:  # sent before the last answer
            self.cycle.disconnected = True
            self.transport.abort()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end_in(None)
        super().on_message_complete()


def raise_open_files() -> None:
    """Raise the limit of open files to its hard limit, because each connection needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else most  # macOS reports infinity but accepts only a number
    with suppress(ValueError, OSError):  # some systems allow less than their hard limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
