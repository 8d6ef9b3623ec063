"""POST batches, without blocking on slow name servers or endless answers, and decide when to send them again."""

import asyncio
import json
import logging
import math
import random
import re
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from pydantic import SecretStr

from foreshock.contract import wire
from foreshock.contract.environment import token_in
from foreshock.contract.route import route_to
from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER

logger: Final = logging.getLogger("foreshock")

FIRST_DELAY_SECONDS: Final = 1.0
LONGEST_DELAY_SECONDS: Final = 60.0
_SPREAD: Final = random.SystemRandom()  # does not change the state of the training's generators


def headers_of(own: str, own_age_seconds: float, boot: str) -> dict[str, str]:
    """Return the headers of a batch of process instance `boot`, sent by process instance `own` of this age.

    The names of process instances contain the start time by the clock of their node. If `boot` is a dead process, the
    difference of these times is added to the age, if it is positive.
    """
    if boot == own:
        return {AGE_HEADER: f"{own_age_seconds:.3f}"}
    apart = (_milliseconds(own) - _milliseconds(boot)) / 1000
    return {AGE_HEADER: f"{own_age_seconds + max(apart, 0.0):.3f}", REPLAYED_HEADER: "true"}


def _milliseconds(boot: str) -> int:
    milliseconds = boot.partition("-")[0]
    return int(milliseconds) if milliseconds.isdecimal() else 0


class Bearer:
    """The token of the service, from the settings or from a file that may change."""

    def __init__(self, token: SecretStr | None, file: Path | None) -> None:
        self._token, self._file = token, file if token is None else None
        self.renewed()

    @property
    def header(self) -> dict[str, str]:
        """Return the Authorization header; {} without a token."""
        return {} if self._token is None else {"Authorization": f"Bearer {self._token.get_secret_value()}"}

    def renewed(self) -> bool:
        """Read the file again; return whether it contains a different token. An unusable file is ignored."""
        if self._file is None:
            return False
        before = self._token
        with suppress(ValueError):
            self._token = token_in(self._file)
        return self._token != before


_HEADERS: Final = {
    "User-Agent": "foreshock-agent",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}


class Answer(NamedTuple):
    """The parts of a response that are used."""

    status: int
    retry_after: str | None = None
    body: bytes | None = None
    """None if it is longer than wire.MAX_ACK_BYTES."""


class Connection:
    """POSTs batches to one service, by the proxy that the environment sets.

    It uses httpx's transport without httpx's client, because the client would store cookies, parse redirects, and log
    a line for each request.
    """

    def __init__(self, url: str, seconds: float) -> None:
        base = httpx.URL(url)
        self._url = base.copy_with(raw_path=base.raw_path.rstrip(b"/") + b"/v1/batches")
        # shorter than the total deadline, because a handshake closes its socket on timeout, but not on cancellation
        self._timeout = httpx.Timeout(seconds, connect=0.4 * seconds).as_dict()
        self._transport: httpx.AsyncHTTPTransport | None = None
        self.route = ""
        """The proxy, as text to append to the address; empty without a proxy."""

    def open(self) -> None:
        """Open the transport; call it before each `post`. Raises RouteError if an environment variable is invalid."""
        if self._transport is not None:
            return
        route = route_to(str(self._url))
        if str(route) != self.route:
            self.route = str(route)
            logger.info("foreshock: batches are sent to %s%s", self._url, self.route)
        self._transport = httpx.AsyncHTTPTransport(verify=route.tls, proxy=route.proxy, trust_env=False)

    async def post(self, payload: bytes, headers: dict[str, str]) -> Answer:
        """Send a batch and return the answer. Raises OSError and httpx's errors."""
        assert self._transport is not None
        request = httpx.Request(
            "POST", self._url, headers=_HEADERS | headers, content=payload, extensions={"timeout": self._timeout}
        )
        response = await self._transport.handle_async_request(request)
        try:
            body: bytes | None = b""
            async for chunk in response.aiter_raw():
                body = (body or b"") + chunk
                if len(body) > wire.MAX_ACK_BYTES:
                    body = None
                    break
            return Answer(response.status_code, response.headers.get("retry-after"), body)
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close the connections; the next `open` reads the environment and certificate files again."""
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(Exception):
                await transport.aclose()


def speaks_of_the_batch(answer: Answer) -> bool:
    """Whether the service rejected the batch itself, so that sending it again is useless.

    A 400 without JSON comes from a server that did not read the batch, for example because the request's headers are
    too long. All other errors (redirect, token, address, limit) end when a person corrects the setting.
    """
    if answer.status != 400:
        return answer.status == 422
    try:
        is_object = isinstance(json.loads(answer.body or b""), dict)
    except (ValueError, RecursionError):
        return False
    return is_object and not re.search(rb"\b(header|cookie)", (answer.body or b"").lower())


class ResolvingLoop(asyncio.SelectorEventLoop):
    """Resolves names in daemon threads, because the interpreter waits for an executor's threads at exit."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Resolve a name, as the base class does."""
        future: asyncio.Future[Any] = self.create_future()

        def resolve() -> None:
            try:
                settle = partial(future.set_result, socket.getaddrinfo(host, port, **options))
            except OSError as failure:
                settle = partial(future.set_exception, failure)
            except UnicodeError as failure:  # an invalid name, for example of a proxy in the environment
                settle = partial(future.set_exception, OSError(f"not the name of a host: {failure}"))
            with suppress(RuntimeError):  # the loop is closed
                self.call_soon_threadsafe(lambda: None if future.done() else settle())

        threading.Thread(target=resolve, name="foreshock-resolver", daemon=True).start()
        return await future


def is_retryable(status: int) -> bool:
    """Whether a status is a temporary error: 408, 429 or any 5xx."""
    return status in (408, 429) or 500 <= status < 600


def retry_delay(failures: int, retry_after: str | None, random_unit: float | None = None) -> float:
    """Return the delay after `failures` (1 or more) failures in a row, 1 to 60 seconds, with jitter.

    A valid Retry-After can lengthen the delay, up to the maximum, but never shortens it.
    """
    unit = _SPREAD.random() if random_unit is None else random_unit
    ceiling = min(FIRST_DELAY_SECONDS * float(2 ** min(failures - 1, 16)), LONGEST_DELAY_SECONDS)
    own = max(FIRST_DELAY_SECONDS, ceiling * (0.5 + 0.5 * unit))
    try:
        asked = float(retry_after or 0)  # dates are ignored: they depend on two clocks
    except ValueError:
        return own
    return min(max(own, asked * (1 + 0.25 * unit)), LONGEST_DELAY_SECONDS) if math.isfinite(asked) else own


def without_samples(payload: bytes) -> bytes | None:
    """Remove the samples from a batch for a proxy with a size limit: b"" if only samples, None if no samples."""
    batch = json.loads(payload)
    others = [event for event in batch["events"] if event["kind"] != "sample"]
    if len(others) == len(batch["events"]):
        return None
    return json.dumps({**batch, "events": others}).encode() if others else b""
