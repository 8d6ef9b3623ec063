"""What the service bears besides batches: scrapes of many runs, many listeners, jobs that start.

`foreshock bench service`. Real service processes on 127.0.0.1, driven over real sockets.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]
import psutil  # type: ignore[import-untyped]

from foreshock.benchmarks.ingest import cpu_seconds, device
from foreshock.benchmarks.ingest_clients import HEADS, LAYERS, post
from foreshock.contract.wire import Sample
from foreshock.server.testing import FakeRank, LiveService

_CONNECTIONS: Final = 32
_ROUNDS: Final = 5
_AGAIN_SECONDS: Final = 0.1
"""How long a rank waits that was told that the service is busy; an agent's first wait is longer."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def main(
    json_path: Path | None = None,
    *,
    database_url: str | None = None,
    runs: int = 2000,
    listeners: int = 500,
    ranks: int = 256,
    replicas: Sequence[int] = (1, 2, 3),
) -> dict[str, Any]:
    """Measure, print and write the figures. Jobs start only where `database_url` names a PostgreSQL to write to."""
    report = device(database_url) | {"command": "foreshock bench service --json FILE"}
    report["scrapes"] = _in_service(lambda service: _scrapes(service, runs))
    report["streams"] = _in_service(lambda service: _streams(service, listeners))
    if database_url is not None:
        report["starts"] = [_starts(database_url, count, ranks) for count in replicas]
    print(json.dumps(report, indent=2))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _in_service(story: Callable[[LiveService], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    environment = {"FORESHOCK_RUN_BATCHES_PER_SECOND": "1e9"}
    with tempfile.TemporaryDirectory() as folder, LiveService(Path(folder), environment) as service:

        async def look() -> dict[str, Any]:
            return await story(service)

        return asyncio.run(look())


async def _open(service: LiveService) -> Stream:
    address = urlsplit(service.url)
    return await asyncio.open_connection(address.hostname, address.port, limit=2**26)


async def _close(streams: Sequence[Stream]) -> None:
    for _, writer in streams:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in streams), return_exceptions=True)


async def _until_stored(stream: Stream, body: bytes) -> int:
    """Send as an agent does: again, while the service says that it is busy. How often it said so."""
    refused = 0
    while (status := (await post(*stream, body))[0]) != 200:
        if status != 429:
            raise RuntimeError(f"the service answered {status} to a batch")
        refused += 1
        await asyncio.sleep(_AGAIN_SECONDS)
    return refused


def _first_batch(run: str, rank: int, sample: Sample) -> bytes:
    own = FakeRank(run=run, rank=rank, layers=LAYERS, heads=range(HEADS))
    return own.batch(own.started(), sample).model_dump_json().encode()


async def _scrapes(service: LiveService, runs: int) -> dict[str, Any]:
    sample = FakeRank(layers=LAYERS, heads=range(HEADS)).sample(1)
    streams = [await _open(service) for _ in range(_CONNECTIONS)]

    async def send(number: int, step: int) -> None:
        for one in range(number, runs, _CONNECTIONS):
            body = _first_batch(f"run-{one:05}", 0, sample)
            if step > 1:
                own = FakeRank(run=f"run-{one:05}", layers=LAYERS, heads=range(HEADS))
                later = sample.model_copy(update={"step": step, "since_step": step - 1})
                body = own.batch(later, sequence=step).model_dump_json().encode()
            await _until_stored(streams[number], body)

    async def scrape() -> dict[str, Any]:
        def get() -> int:
            with service.client(timeout=120.0) as client:
                return len(client.get("/metrics").content)

        before, began = cpu_seconds(service), time.monotonic()
        size = await asyncio.to_thread(get)
        took, spent = time.monotonic() - began, cpu_seconds(service) - before
        return {"seconds": round(took, 3), "cpu_seconds": round(spent, 3), "bytes": size}

    found: dict[str, Any] = {"runs": runs}
    for step, name in ((1, "all runs new"), (2, "all runs changed")):
        await asyncio.gather(*(send(number, step) for number in range(_CONNECTIONS)))
        found[name] = await scrape()
    found["nothing changed"] = await scrape()
    found["rss_bytes"] = psutil.Process(service.pid).memory_info().rss
    await _close(streams)
    return found


async def _streams(service: LiveService, listeners: int) -> dict[str, Any]:
    streams = [await _open(service) for _ in range(listeners)]
    for _, writer in streams:
        writer.write(b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    await asyncio.gather(*(reader.readuntil(b": listening") for reader, _ in streams))
    rank = FakeRank()
    sender = await _open(service)
    await _until_stored(sender, rank.batch(rank.started()).model_dump_json().encode())
    took, spent = [], []
    for turn in range(_ROUNDS):
        body = rank.batch(rank.verdict(turn + 1, name=f"w-{turn}")).model_dump_json().encode()
        before, began = cpu_seconds(service), time.monotonic()
        await _until_stored(sender, body)
        await asyncio.gather(*(reader.readuntil(b"event: verdict") for reader, _ in streams))
        took.append(round(time.monotonic() - began, 3))
        spent.append(round(cpu_seconds(service) - before, 3))
    await _close([*streams, sender])
    return {"listeners": listeners, "seconds_until_all_were_told": took, "cpu_seconds": spent}


def _starts(database_url: str, replicas: int, ranks: int) -> dict[str, Any]:
    environment = {"FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_MIGRATE": "true"}
    with ExitStack() as stack:
        services = []
        for _ in range(replicas):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            services.append(stack.enter_context(LiveService(folder, environment)))
        return asyncio.run(_start_at_once(database_url, services, ranks))


async def _start_at_once(database_url: str, services: Sequence[LiveService], ranks: int) -> dict[str, Any]:
    name, sample = f"job-{time.time_ns():x}", FakeRank(layers=LAYERS, heads=range(HEADS)).sample(1)
    bodies = [_first_batch(name, rank, sample) for rank in range(ranks)]
    streams = [await _open(services[rank % len(services)]) for rank in range(ranks)]
    before, began = await _deadlocks(database_url), time.monotonic()
    refused = await asyncio.gather(*(_until_stored(*both) for both in zip(streams, bodies, strict=True)))
    took = time.monotonic() - began
    await _close(streams)
    await asyncio.sleep(1.5)  # PostgreSQL's counters lag
    return {
        "replicas": len(services),
        "ranks": ranks,
        "seconds": round(took, 3),
        "refused_for_a_moment": sum(refused),
        "deadlocks": await _deadlocks(database_url) - before,
    }


async def _deadlocks(database_url: str) -> int:
    connection = await asyncpg.connect(database_url)
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    found: int = await connection.fetchval(query)
    await connection.close()
    return found
