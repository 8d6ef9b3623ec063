"""Clients of the ingest benchmark: processes with many connections each, closed loop, one batch under way on each.

Nothing but the standard library lies between a client and its socket, and a client puts its numbers into a batch that
was written before: `cpu_seconds` gives the clients' share of the machine's cores next to the service's, because on
shared cores the clients' time is missing to the service. Where clients keep their cores busy, it is
they who are measured.

Each batch holds one sample, as agents send them: every statistic of 144 heads (int64 [144, slots]), their modes, three
norms and risks, and every scalar; about 24 kB of JSON.
"""

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import numpy as np

from foreshock.contract.wire import Array
from foreshock.server.testing import FakeRank

LAYERS, HEADS = 12, 12
_SINCE, _STEP, _SEQUENCE = 90_000_000_001, 90_000_000_002, 90_000_000_003
_RUN, _BOOT = "the-run", "the-boot"


@dataclass
class Load:
    """What some clients do. Client i sends as rank i to run i, modulo the number of runs."""

    url: str
    clients: int
    runs: int
    seconds: float
    name: str
    """Tells this load's runs and boots from another's."""
    every_seconds: float = 0.0
    """Between two batches of a client; 0: it sends the next one at once."""
    every_steps: int = 1
    """Between two samples of a client."""


@dataclass
class Result:
    """What came of a load."""

    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the load began, seconds from the first byte sent to the last byte read) of each stored batch."""
    retry_after: int = 0
    """How many of the 429 carried a Retry-After header."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of all clients, their start left out."""

    @property
    def stored_per_second(self) -> float:
        """Acknowledged batches per second."""
        return self.statuses[200] / self.seconds

    def quantile(self, share: float) -> float:
        """Seconds within which this share of the acknowledged batches were answered; NaN when there is none."""
        return float(np.quantile([took for _, took in self.latencies], share)) if self.latencies else float("nan")


def _rank() -> FakeRank:
    return FakeRank(run=_RUN, boot=_BOOT, layers=LAYERS, heads=range(HEADS))


def template() -> bytes:
    """A batch of one sample with every metric of 12 layers and 12 heads; its numbers are put in by `_body`."""
    rank = _rank()
    norms = Array.of(np.linspace(1.0, 20.0, rank.count).astype(np.float32))
    sample = rank.sample(_STEP, since=0).model_copy(
        update={"since_step": _SINCE, "query_norm": norms, "key_norm": norms, "query_key_norm": norms}
    )
    return rank.batch(sample, sequence=_SEQUENCE).model_dump_json().encode()


def _body(shape: bytes, number: int, every_steps: int = 1) -> bytes:
    for one, value in ((_SEQUENCE, number), (_STEP, number * every_steps), (_SINCE, (number - 1) * every_steps)):
        shape = shape.replace(b"%d" % one, b"%d" % value)
    return shape


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    """Send a batch: the status of the answer, and its head in small letters."""
    writer.write(
        b"POST /v1/batches HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return int(head[9:12]), head


def _of_client(load: Load, number: int, body: bytes) -> bytes:
    body = body.replace(b'"%s"' % _BOOT.encode(), b'"%s-%d"' % (load.name.encode(), number))
    body = body.replace(b'"rank":0', b'"rank":%d' % number)
    return body.replace(b'"%s"' % _RUN.encode(), b'"%s-%d"' % (load.name.encode(), number % load.runs), 1)


async def _client(load: Load, number: int, shape: bytes, began: float, result: Result) -> None:
    """The client's first batch describes its process, as an agent's does."""
    address, rank = urlsplit(load.url), _rank()
    described = _of_client(load, number, rank.batch(rank.started()).model_dump_json().encode())
    shape = _of_client(load, number, shape)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    sequence, due = 1, began + load.every_seconds * number / load.clients
    while (start := time.monotonic()) < began + load.seconds:
        if start < due:
            await asyncio.sleep(due - start)
            continue
        due += load.every_seconds
        body = described if sequence == 1 else _body(shape, sequence, load.every_steps)
        status, head = await post(reader, writer, body)
        result.statuses[status] += 1
        if status == 200:
            result.latencies.append((start - began, time.monotonic() - start))
            sequence += 1
        elif status == 429 and b"\r\nretry-after:" in head:
            result.retry_after += 1
    writer.close()
    await writer.wait_closed()


async def _drive(load: Load, numbers: Sequence[int], result: Result) -> None:
    shape = template()
    began, spent = time.monotonic(), time.process_time()
    await asyncio.gather(*(_client(load, number, shape, began, result) for number in numbers))
    result.seconds, result.cpu_seconds = time.monotonic() - began, time.process_time() - spent


def _process(load: Load, numbers: Sequence[int]) -> Result:
    result = Result()
    asyncio.run(_drive(load, numbers, result))
    return result


def run_load(load: Load, processes: int = 2) -> Result:
    """Let the clients, spread over processes, send for `seconds`; what they saw, together."""
    shares = [range(number, load.clients, processes) for number in range(min(processes, load.clients))]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(partial(_process, load), shares))
    whole = Result(seconds=max(part.seconds for part in parts))
    for part in parts:
        whole.statuses += part.statuses
        whole.latencies += part.latencies
        whole.retry_after += part.retry_after
        whole.cpu_seconds += part.cpu_seconds
    return whole
