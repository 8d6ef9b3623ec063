"""Whoever reads, however much, takes nothing from ingest: not its connection, not the event loop."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Connection

from foreshock.server.http import exposition
from foreshock.server.models import Response
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


@pytest.mark.full
def test_large_answers_are_read_and_written_beside_the_event_loop(
    on_both: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, worked = threading.get_ident(), defaultdict[str, set[int]](set)

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            worked[name].add(threading.get_ident())
            return work(*given, **more)

        return call

    for owner, name in ((Response, "model_dump_json"), (Connection, "execute"), (exposition, "line")):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))

    async def story(service: Any) -> None:
        rank = FakeRank(layers=160, heads=range(40))
        await service.store(rank, rank.started())
        for step in range(1, 4):
            await service.store(rank, rank.sample(step))
        for path in LARGE:
            worked.clear()
            answer = await service.client.get(path)
            assert answer.status_code == 200
            assert worked["execute"]
            assert worked["line" if path == "/metrics" else "model_dump_json"]
            assert all(loop not in threads for threads in worked.values()), path

    on_both(story)
