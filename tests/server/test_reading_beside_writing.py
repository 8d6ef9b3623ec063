"""Whoever reads, however much, takes nothing from ingest: not its connection, not the event loop."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from foreshock.server.curves import drawing, matrix
from foreshock.server.curves.rollups import Roller
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S4")


def test_batches_are_stored_while_readers_hold_every_connection(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        async with AsyncExitStack() as held:
            for _ in range(15):
                await held.enter_async_context(service.app.state.store.read())
            async with asyncio.timeout(10):
                await service.store(rank, rank.sample(2))

    play(story)


def test_samples_are_merged_beside_the_event_loop(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where: Counter[str] = Counter()

    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), *(rank.sample(step) for step in range(1, 30)))
        loop = threading.current_thread()
        for module in (drawing, matrix):
            merge = vars(module)["merge"]

            def watched(*given: Any, merge: Any = merge, module: Any = module) -> Any:
                where[f"{module.__name__} {'loop' if threading.current_thread() is loop else 'thread'}"] += 1
                return merge(*given)

            monkeypatch.setattr(module, "merge", watched)
        await service.get("/v1/runs/run-1/series", metric="head.score_max")
        await service.get("/v1/runs/run-1/curves", line="head.score_max:0:1")
        await service.get("/v1/runs/run-1/matrix", metric="head.score_max")
        assert {name.rpartition(" ")[2] for name in where} == {"thread"}
        assert len(where) == 2

    play(story)


def test_few_large_reads_are_at_work_at_once_and_a_crowd_is_told_to_come_back(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, inside = 0, 0

    async def story(service: Any) -> None:
        nonlocal most
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        merge = vars(drawing)["merge"]

        def slow(*given: Any) -> Any:
            nonlocal most, inside
            inside += 1
            most = max(most, inside)
            time.sleep(0.05)
            inside -= 1
            return merge(*given)

        monkeypatch.setattr(drawing, "merge", slow)
        path = "/v1/runs/run-1/series?metric=head.score_max"
        reads = [asyncio.create_task(service.client.get(path)) for _ in range(120)]
        await asyncio.sleep(0.1)
        await service.store(rank, rank.sample(2))
        answers = await asyncio.gather(*reads)
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
        assert sum(answer.status_code == 200 for answer in answers) >= 32
        assert most <= 4

    play(story)


def test_rolling_up_twenty_thousand_runs_looks_at_each_once(play: Any) -> None:
    async def story(service: Any) -> None:
        roller = Roller(service.app.state.store)
        for run_id in range(20_000):
            roller.touch(run_id, 5)
        began = time.process_time()
        await roller.build_cold(cold_seconds=1e6)
        assert time.process_time() - began < 2.0

    play(story)
