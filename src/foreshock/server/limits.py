"""What one caller may take at most: batches and attempts a second, requests and bytes at once, bytes of a body."""

import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from foreshock.server.problems import ProblemError

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


class LoginLimit:
    """How often somebody may try to log in: ten times at once from one network, then every other second.

    From all networks together 200 at once, then 20 a second; a network from which somebody has logged in is not
    counted among them, so that a flood of guesses locks out nobody who has been here.
    """

    def __init__(self) -> None:
        self._of_network, self._of_all = Buckets(0.5, burst=10), Buckets(20.0, burst=200)
        self._known: OrderedDict[str, None] = OrderedDict()

    def take(self, network: str) -> None:
        """Count an attempt. Raises ProblemError 429 when there were too many; then the secret is not looked at."""
        wait = self._of_network.take(network)
        if not wait and network not in self._known:
            wait = self._of_all.take("")
        if wait > 0:
            raise ProblemError(429, "Too many attempts to log in; wait.", headers=retry_after(wait))

    def succeeded(self, network: str) -> None:
        """Somebody logged in from there."""
        self._known[network] = None
        self._known.move_to_end(network)
        if len(self._known) > _MAX_BUCKETS:
            self._known.popitem(last=False)


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
            for counted, number in ((self._requests, 1), (self._bytes, size)):
                counted[who] -= number
                if not counted[who]:
                    del counted[who]


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
