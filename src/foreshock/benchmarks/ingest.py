"""Ingest throughput of the service, and its behaviour under overload: `foreshock bench ingest`.

Two client processes send to a real service process on 127.0.0.1 over many connections, with one batch in flight on
each. Clients and service share the CPU cores. To keep clients cheap, they use only the standard library and insert
their numbers into a prepared batch; the report includes their CPU time. Each batch contains one sample as agents send
it: all statistics of 144 heads, their modes, norms and risks, and all scalars.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import psutil  # type: ignore[import-untyped]

from foreshock.benchmarks import machine
from foreshock.contract.wire import Array
from foreshock.server.testing import FakeRank, LiveService

LAYERS: Final = 12
HEADS: Final = 12
CLIENTS: Final = 32
"""Number of connections, enough to keep two cores busy; the overload has ten times as many."""
UNLIMITED: Final = 1e9
"""Rate limit of a run in batches per second, so high that it does not affect the measurement."""
_RANK: Final = FakeRank(run="the-run", boot="the-boot", layers=LAYERS, heads=range(HEADS))
_SINCE, _STEP, _SEQUENCE = 90_000_000_001, 90_000_000_002, 90_000_000_003


def main(json_path: Path | None = None, *, seconds: float = 20.0, database_url: str | None = None) -> dict[str, Any]:
    """Measure, print the results, write them as JSON, and return them. The overload takes three times `seconds`.

    database_url: a PostgreSQL database that may be overwritten; by default a new SQLite file is used.
    """
    address = {} if database_url is None else {"FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_MIGRATE": "true"}
    name = f"bench-{time.time_ns():x}"
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveService(Path(folder), address, metrics_seconds=1.0, run_batches_per_second=UNLIMITED) as service,
    ):
        run_load(Load(service.url, CLIENTS, CLIENTS, 2.0, f"{name}-warm"))
        report = machine.header("foreshock bench ingest --json FILE") | {
            "store": "SQLite, WAL, synchronous=FULL" if database_url is None else "PostgreSQL",
            "batch": {"layers": LAYERS, "heads": HEADS, "bytes": len(template())},
            "sustained": loaded(service, Load(service.url, CLIENTS, CLIENTS, seconds, f"{name}-a")),
            "overload": loaded(service, Load(service.url, 10 * CLIENTS, CLIENTS, 3 * seconds, f"{name}-b")),
        }
    return machine.written(report, json_path)


def cpu_seconds(service: LiveService) -> float:
    """Return the CPU time of the service so far, in seconds."""
    times = psutil.Process(service.pid).cpu_times()
    return float(times.user + times.system)


def memory_bytes(service: LiveService) -> int:
    """Return the resident memory of the service."""
    return int(psutil.Process(service.pid).memory_info().rss)


@dataclass
class Load:
    """Load from several clients. Client i sends as rank i of run i modulo `runs`."""

    url: str
    clients: int
    runs: int
    seconds: float
    name: str
    """Prefix of the names of runs and process instances, unique for each load."""
    every_seconds: float = 0.0
    """Interval between two batches of a client; 0: without a pause."""
    every_steps: int = 1
    """Steps between two samples of a client."""


@dataclass
class Result:
    """Responses to the clients of a load."""

    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """Seconds from the first byte sent to the last byte received, for each stored batch."""
    retry_after: int = 0
    """Number of responses 429 with a Retry-After header."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of all clients, without their start-up."""


def loaded(service: LiveService, load: Load) -> dict[str, Any]:
    """Run a load and return its figures, with the memory of the service before and after."""
    before, memory = cpu_seconds(service), memory_bytes(service)
    result = run_load(load)
    figures = figures_of(result, cpu_seconds(service) - before)
    return {"clients": load.clients, **figures, "memory_bytes": [memory, memory_bytes(service)]}


def figures_of(result: Result, cpu_seconds: float) -> dict[str, Any]:
    """Summarise throughput, latency and CPU time, and the fractions of status codes."""
    answered, stored = result.statuses.total(), max(1, result.statuses[200])
    half, most = np.quantile(result.latencies or [np.nan], [0.5, 0.99]).tolist()
    return {
        "batches_per_second": round(result.statuses[200] / result.seconds, 1),
        "p50_seconds": round(half, 4),
        "p99_seconds": round(most, 4),
        "cpu_milliseconds_per_batch": round(1e3 * cpu_seconds / stored, 3),
        "service_cores": round(cpu_seconds / result.seconds, 2),
        "clients_cpu_milliseconds_per_batch": round(1e3 * result.cpu_seconds / stored, 3),
        "clients_cores": round(result.cpu_seconds / result.seconds, 2),
        "share_2xx": round(result.statuses[200] / answered, 4),
        "share_429": round(result.statuses[429] / answered, 4),
        "share_5xx": round(sum(n for status, n in result.statuses.items() if status >= 500) / answered, 4),
        "refusals_with_retry_after": result.retry_after == result.statuses[429],
        "load_average": round(os.getloadavg()[0], 2),
    }


def template() -> bytes:
    """Return a batch of one sample with every metric of all heads; `body` inserts its numbers."""
    norms = Array.of(np.linspace(1.0, 20.0, _RANK.count).astype(np.float32))
    known = {"since_step": _SINCE, "query_norm": norms, "key_norm": norms, "query_key_norm": norms}
    sample = _RANK.sample(_STEP, since=0).model_copy(update=known)
    return _RANK.batch(sample, sequence=_SEQUENCE).model_dump_json().encode()


def body(shape: bytes, number: int, every_steps: int = 1) -> bytes:
    """Return batch `number`: the template with its sequence number and steps."""
    for one, value in ((_SEQUENCE, number), (_STEP, number * every_steps), (_SINCE, (number - 1) * every_steps)):
        shape = shape.replace(b"%d" % one, b"%d" % value)
    return shape


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> tuple[int, bytes]:
    """Send a batch; return the status of the response, and its headers in lower case."""
    writer.write(
        b"POST /v1/batches HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(sent) + sent
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return int(head[9:12]), head


async def _client(load: Load, number: int, shape: bytes, began: float, result: Result) -> None:
    """Send batches until the load ends; the first one describes the process, as an agent's does."""
    address, described = urlsplit(load.url), _RANK.batch(_RANK.started()).model_dump_json().encode()
    for old, new in (
        (b'"the-boot"', b'"%s-%d"' % (load.name.encode(), number)),
        (b'"rank":0', b'"rank":%d' % number),
        (b'"the-run"', b'"%s-%d"' % (load.name.encode(), number % load.runs)),
    ):
        described, shape = described.replace(old, new, 1), shape.replace(old, new, 1)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    sequence, due = 1, began + load.every_seconds * number / load.clients
    while (start := time.monotonic()) < began + load.seconds:
        if start < due:
            await asyncio.sleep(due - start)
            continue
        due += load.every_seconds
        status, head = await _post(
            reader, writer, described if sequence == 1 else body(shape, sequence, load.every_steps)
        )
        result.statuses[status] += 1
        if status == 200:
            result.latencies.append(time.monotonic() - start)
            sequence += 1
        elif status == 429 and b"\r\nretry-after:" in head:
            result.retry_after += 1
    writer.close()
    await writer.wait_closed()


async def _drive(load: Load, numbers: Sequence[int]) -> Result:
    result, shape, began, spent = Result(), template(), time.monotonic(), time.process_time()
    await asyncio.gather(*(_client(load, number, shape, began, result) for number in numbers))
    result.seconds, result.cpu_seconds = time.monotonic() - began, time.process_time() - spent
    return result


def _process(load: Load, numbers: Sequence[int]) -> Result:
    return asyncio.run(_drive(load, numbers))


def run_load(load: Load) -> Result:
    """Run the clients of a load in two processes, and return their merged results."""
    shares = [range(number, load.clients, 2) for number in range(min(2, load.clients))]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(partial(_process, load), shares))
    return Result(
        sum((part.statuses for part in parts), Counter()),
        [each for part in parts for each in part.latencies],
        sum(part.retry_after for part in parts),
        max(part.seconds for part in parts),
        sum(part.cpu_seconds for part in parts),
    )
