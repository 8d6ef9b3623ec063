"""Whoever reads, however much, takes nothing from ingest: not its connection, not the event loop."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from tests.server.loopwatch import watched_loop

from foreshock.server.testing import FakeRank

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
