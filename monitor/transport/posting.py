"""A POST of a batch that no slow name server and no endless answer holds up, and when it is sent again."""

import asyncio
import email.utils
import json
import math
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
from pydantic import SecretStr

from foreshock.contract import wire
from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER
from foreshock.monitor.config import token_in

FIRST_DELAY_SECONDS: Final = 1.0
LONGEST_DELAY_SECONDS: Final = 60.0
_SPREAD: Final = random.SystemRandom()  # of its own: the trained program's generator is not touched


def headers_of(own: str, own_age_seconds: float, boot: str) -> dict[str, str]:
    """The headers of a batch of the process start `boot` that the process start `own`, of this age, sends.

    A dead one is older than who found its spool: by their names, which are times on the clocks of their nodes, if that
    is so.
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
        """Empty without a token."""
        return {} if self._token is None else {"Authorization": f"Bearer {self._token.get_secret_value()}"}

    def renewed(self) -> bool:
        """Read the file again; whether it holds another token now. A file that cannot be used changes nothing."""
        if self._file is None:
            return False
        before = self._token
        with suppress(ValueError):
            self._token = token_in(self._file)
        return self._token != before


async def post(
    client: httpx.AsyncClient, payload: bytes, headers: dict[str, str]
) -> tuple[int, str | None, bytes | None]:
    """(status, Retry-After, body); the body is None when it is longer than wire.MAX_ACK_BYTES."""
    async with client.stream("POST", "/v1/batches", content=payload, headers=headers) as response:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > wire.MAX_ACK_BYTES:
                return response.status_code, response.headers.get("retry-after"), None
        return response.status_code, response.headers.get("retry-after"), bytes(body)


class ResolvingLoop(asyncio.SelectorEventLoop):
    """Resolves names in daemon threads: the executor's threads would be waited for when the interpreter exits."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """As the base class."""
        future: asyncio.Future[Any] = self.create_future()

        def resolve() -> None:
            try:
                found, error = socket.getaddrinfo(host, port, **options), None
            except OSError as failure:
                found, error = None, failure
            try:
                self.call_soon_threadsafe(settle, found, error)
            except RuntimeError:
                return  # the loop is closed; nobody waits any more

        def settle(found: Any, error: OSError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(found)

        threading.Thread(target=resolve, name="foreshock-resolver", daemon=True).start()
        return await future


def is_retryable(status: int) -> bool:
    """408, 429 and every 5xx: trouble that passes by itself."""
    return status in (408, 429) or 500 <= status < 600


def is_final(status: int) -> bool:
    """400 and 422 speak of the batch itself; all else (a redirect, a token, an address, a limit) someone can mend."""
    return status in (400, 422)


def retry_delay(failures: int, retry_after: str | None, random_unit: float | None = None) -> float:
    """Seconds to wait after `failures` (1 or more) failures in a row, 1 to 60, spread out so that clients part ways.

    A valid Retry-After lengthens the wait, up to the longest; it never shortens it.
    """
    unit = _SPREAD.random() if random_unit is None else random_unit
    ceiling = min(FIRST_DELAY_SECONDS * float(2 ** min(failures - 1, 16)), LONGEST_DELAY_SECONDS)
    own = max(FIRST_DELAY_SECONDS, ceiling * (0.5 + 0.5 * unit))
    asked = retry_after_seconds(retry_after)
    return own if asked is None else min(max(own, asked * (1 + 0.25 * unit)), LONGEST_DELAY_SECONDS)


def retry_after_seconds(header: str | None, *, now: float | None = None) -> float | None:
    """Seconds asked for by a Retry-After header of either form; None when it is absent, past or senseless."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
            seconds = moment.timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def without_samples(payload: bytes) -> bytes | None:
    """A batch without its samples, for a proxy with a limit: empty if it held no more, None if it held none."""
    batch = json.loads(payload)
    others = [event for event in batch["events"] if event["kind"] != "sample"]
    if len(others) == len(batch["events"]):
        return None
    return json.dumps({**batch, "events": others}).encode() if others else b""
