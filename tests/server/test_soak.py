"""The service under steady load for the time of the tier: memory, files, threads and write-ahead log do not grow."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from foreshock.server.testing import FakeRank, LiveService

STEPS_A_SECOND = 10
SINCE, STEP, SEQUENCE = 90_000_000_001, 90_000_000_002, 90_000_000_003
RUN_SECONDS = 20.0
"""Duration of a run, and retention after its end."""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def post(connection: Connection, body: bytes) -> int:
    """Send a batch and return the status code. Uses only asyncio streams, to leave the processors to the service."""
    reader, writer = connection
    head = (
        b"POST /v1/batches HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    writer.write(head % len(body) + body)
    response = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(response.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return int(response[9:12])


async def one_rank(url: str, number: int, run_seconds: float, until: float, sent: list[int]) -> None:
    """Send 10 samples a second, each in its own batch, as the agent does when it samples every step."""
    began, generation = time.monotonic(), 0
    address = urlsplit(url)
    connection = await asyncio.open_connection(address.hostname, address.port)
    rank, sequence, template = FakeRank(rank=number), 0, ""
    next_at = began + number / 64 / STEPS_A_SECOND
    while (now := time.monotonic()) < until:
        if not template or int((now - began) / run_seconds) > generation:
            generation = int((now - began) / run_seconds)
            rank, sequence = FakeRank(run=f"soak-{generation}", rank=number), 1
            template = rank.batch(rank.sample(STEP, since=SINCE), sequence=SEQUENCE).model_dump_json()
            body = rank.batch(rank.started(), sequence=1).model_dump_json()
        else:  # fill in a template, which costs less processor time than a new batch
            sequence += 1
            body = template.replace(str(SEQUENCE), str(sequence)).replace(str(STEP), str(sequence - 1))
            body = body.replace(str(SINCE), str(sequence - 2))
        assert await post(connection, body.encode()) == 200
        sent[0] += 1
        next_at += 1 / STEPS_A_SECOND
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    connection[1].close()
    await connection[1].wait_closed()


class Usage(dict[str, list[float]]):
    """Resource usage of the service process and its store over time."""

    def measure(self, process: psutil.Process, database: Path) -> None:
        wal = database.with_name(database.name + "-wal")
        now = {
            "rss MiB": process.memory_info().rss / 2**20,
            "files": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "WAL MiB": wal.stat().st_size / 2**20 if wal.exists() else 0.0,
        }
        for name, value in now.items():
            self.setdefault(name, []).append(value)

    def grown(self, name: str) -> float:
        """Growth of the median from the second to the last quarter; medians tolerate outliers."""
        values = self[name]
        quarter = max(1, len(values) // 4)
        return float(np.median(values[-quarter:]) - np.median(values[quarter : 2 * quarter]))


@pytest.mark.promise("S17")
@pytest.mark.parametrize("run_seconds", [RUN_SECONDS, pytest.param(math.inf, marks=pytest.mark.full)])
def test_memory_files_threads_and_wal_stay_flat_under_steady_load(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None], run_seconds: float
) -> None:
    """Ranks switch to a new run after `run_seconds`; the old run is deleted soon after."""
    seconds, ranks = sizes("soak_seconds", quick=5, long=1800), sizes("soak_ranks", quick=8, long=64)
    environment = {"FORESHOCK_RETENTION_SECONDS": str(RUN_SECONDS)}
    usage, sent = Usage(), [0]

    async def load(service: LiveService) -> None:
        process = psutil.Process(service.pid)
        async with httpx.AsyncClient(base_url=service.url, timeout=30.0, trust_env=False) as client:
            until = time.monotonic() + seconds
            senders = [one_rank(service.url, number, run_seconds, until, sent) for number in range(ranks)]
            tasks = [asyncio.create_task(rank) for rank in senders]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(min(1.0, seconds / 40))
                usage.measure(process, tmp_path / "foreshock.db")
                assert (await client.get("/metrics")).status_code == 200
                runs = (await client.get("/v1/runs", params={"limit": 1})).json()["runs"]
                if (
                    runs and len(usage["threads"]) % 10 == 1
                ):  # not every time: samples without a roll-up are slow to read with many ranks
                    curves = await client.get(f"/v1/runs/{runs[0]['run']}/curves", params={"line": "head.score_max"})
                    assert curves.status_code in (200, 404), "404 only if the run was deleted meanwhile"
            await asyncio.gather(*tasks)
            runs = (await client.get("/v1/runs", params={"limit": 500})).json()["runs"]
            record_property("runs not deleted", len(runs))
            assert len(runs) <= 3 + (30 / RUN_SECONDS)  # retention runs every ten seconds

    with LiveService(tmp_path, environment) as service:
        asyncio.run(load(service))
        assert service.stop() == 0
    errors = [line for line in (tmp_path / "service.log").read_text().splitlines() if '"level": "error"' in line]
    assert errors == []
    record_property("seconds", seconds)
    record_property("batches a second", round(sent[0] / seconds))
    for name in usage:
        record_property(f"{name}, last", round(usage[name][-1], 1))
        record_property(f"{name}, grown", round(usage.grown(name), 2))
    assert sent[0] >= seconds * ranks, "the senders did not reach the intended load"
    assert usage.grown("rss MiB") < 32
    assert usage.grown("files") <= 4
    assert usage.grown("threads") <= 2
    assert max(usage["WAL MiB"]) < 64
