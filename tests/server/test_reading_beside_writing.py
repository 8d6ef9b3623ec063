"""Whoever reads, however much, takes nothing from ingest: not its connection, not the event loop."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.loopwatch import watched_loop

from foreshock.server.testing import FakeRank, LiveService

pytestmark = pytest.mark.promise("S4")


async def test_batches_are_stored_while_readers_hold_every_connection(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1))
    engine = service.app.state.store.reader.engine
    with ExitStack() as held:
        for _ in range(engine.pool.size()):
            held.enter_context(engine.begin())
        async with asyncio.timeout(10):
            await service.store(rank, rank.sample(2))


LARGE = (
    "/v1/runs/run-1/curves?line=head.score_max",
    "/v1/runs/run-1/curves?" + "&".join(f"line=head.score_max:{layer}" for layer in range(100)),
    "/v1/runs/run-1/matrix?metric=head.score_max",
    "/v1/runs/run-1",
    "/v1/runs",
    "/metrics",
)


PART_HELD = 0.1
"""Of the processor time that an answer takes, what one callback of the event loop may."""


@pytest.mark.full
def test_large_answers_are_read_and_written_beside_the_event_loop(on_both: Callable[..., None]) -> None:
    held: dict[str, float] = {}

    async def story(service: Any) -> None:
        rank = FakeRank(layers=160, heads=range(40))
        await service.store(rank, rank.started())
        for step in range(1, 13):
            await service.store(rank, rank.sample(step))
        for path in LARGE:
            with watched_loop() as watch:
                answer = await service.client.get(path)
            assert answer.status_code == 200
            held[path[:40]] = watch.part

    on_both(story)
    assert max(held.values()) < PART_HELD, held


@pytest.mark.full
def test_sigterm_ends_the_service_in_order_while_many_read_and_many_send(tmp_path: Path, sizes: Any) -> None:
    wide, readers = FakeRank(layers=400, heads=range(128)), sizes("readers", quick=24, long=48)

    async def story(service: LiveService) -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=service.url, timeout=60.0, trust_env=False, limits=limits) as client:
            headers = {"content-type": "application/json"}
            for event in (wide.started(), wide.sample(1), wide.sample(2)):
                body = wide.batch(event).model_dump_json()
                assert (await client.post("/v1/batches", content=body, headers=headers)).status_code == 200

            async def send(number: int) -> None:
                rank = FakeRank(run="other", rank=number)
                for step in range(1, 100_000):
                    body = rank.batch(rank.sample(step)).model_dump_json()
                    if (await client.post("/v1/batches", content=body, headers=headers)).status_code != 200:
                        break

            path = "/v1/runs/run-1/curves?line=head.score_max"
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(client.get(path)) for _ in range(readers)]
            tasks += [asyncio.create_task(send(number)) for number in range(8)]
            await asyncio.sleep(0.5)
            status = await asyncio.to_thread(service.stop, 25.0)
            await asyncio.gather(*tasks, return_exceptions=True)
            return status

    with LiveService(tmp_path) as service:
        assert asyncio.run(story(service)) == 0
    words = (tmp_path / "service.log").read_text()
    assert '"level": "error"' not in words
    assert "Traceback" not in words
