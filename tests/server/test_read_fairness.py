"""Fair scheduling of reads between callers, and reads that block neither ingest nor the event loop."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection

from foreshock.server.http import exposition
from foreshock.server.models import Response
from foreshock.server.settings import Token
from foreshock.server.store.database import LeftError, Turns
from foreshock.server.testing import FakeRank

ANN, BOB = "ann-has-this-secret", "bob-has-this-secret"
TOKENS = (Token.of("ann", ANN, ("ingest", "read")), Token.of("bob", BOB, ("ingest", "read"), "b/"))
CURVES = "/v1/runs/b/one/curves?line=run.loss"


async def run_ready_tasks() -> None:
    """Run all tasks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=24))
@pytest.mark.promise("S26")
def test_waiting_callers_are_served_round_robin(at_once: int, requests: list[tuple[str, bool]]) -> None:
    """Some requests leave the queue while they wait, half of them by cancellation."""

    async def scenario() -> None:
        turns, served, release = Turns(at_once, 100), list[str](), asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        leavers: list[tuple[asyncio.Task[None], asyncio.Future[None]]] = []

        async def ask(caller: str, leaves: asyncio.Future[None]) -> None:
            async with turns.turn(caller, leaves):
                served.append(caller)
                await release.acquire()

        tasks: list[asyncio.Task[None]] = []
        for caller, stays in requests:
            leaves: asyncio.Future[None] = loop.create_future()
            tasks.append(asyncio.create_task(ask(caller, leaves)))
            if not stays and len(tasks) > at_once:
                leavers.append((tasks[-1], leaves))
        await run_ready_tasks()
        for number, (task, leaves) in enumerate(leavers):
            if number % 2:
                task.cancel()
            else:
                leaves.set_result(None)
        await run_ready_tasks()
        left = {task for task, _ in leavers}
        waiting = [
            caller for (caller, _), task in list(zip(requests, tasks, strict=True))[at_once:] if task not in left
        ]
        begun = len(served)
        for _ in waiting:
            release.release()
            await run_ready_tasks()
        order = served[begun:]
        assert sorted(order) == sorted(waiting)
        for place, caller in enumerate(order):  # no caller gets a second turn while another one waits for its first
            before = order[:place]
            for other in set(order[place:]) - {caller}:
                assert before.count(caller) <= before.count(other)
        for _ in requests:
            release.release()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, LeftError | asyncio.CancelledError) for end in ends)
        async with AsyncExitStack() as all_free, asyncio.timeout(1):
            for _ in range(at_once):
                await all_free.enter_async_context(turns.turn("z"))

    asyncio.run(scenario())


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.settings(tokens=TOKENS)
@pytest.mark.promise("S26")
async def test_curves_of_one_token_do_not_delay_reads_of_another(service: Any) -> None:
    rank = FakeRank(run="b/one")
    assert (await service.post(rank.batch(rank.started(), rank.sample(1)), secret=BOB)).status_code == 200

    async def status(path: str, secret: str) -> int:
        return int((await service.client.get(path, headers=bearer(secret))).status_code)

    large = service.app.state.store.large
    async with AsyncExitStack() as first:
        await first.enter_async_context(large.turn("ann"))
        async with large.turn("ann"):
            anns = [asyncio.create_task(status(CURVES, ANN)) for _ in range(66)]
            await run_ready_tasks()
            async with asyncio.timeout(10):
                for path in ("/v1/runs", "/v1/runs/b/one"):
                    assert await status(path, BOB) == 200
            bobs = asyncio.create_task(status(CURVES, BOB))
            await run_ready_tasks()
            refused = [task.result() for task in anns if task.done()]
            assert refused == [429, 429]
        async with asyncio.timeout(10):
            assert await bobs == 200
    assert sorted(await asyncio.gather(*anns)) == [200] * 64 + [429] * 2


WITHOUT_THE_STORE = {
    "/v1/catalog",
    "/",
    "/healthz",
    "/readyz",
    "/metrics",
    "/favicon.ico",
    "/v1/session",
    "/v1/service",
    "/v1/stream",
}
QUERY = {"line": "run.loss", "metric": "head.score_max", "mode": "exact_delta"}


@pytest.mark.promise("S26")
async def test_every_read_of_the_store_waits_for_its_turn(service: Any) -> None:
    """Otherwise, many requests of one caller for incidents or events would delay the reads of others."""
    rank = FakeRank(run="b/one")
    await service.store(rank, rank.started(), rank.sample(1))
    order = {"who": "ann", "reason": "drift", "heads": None, "mode": "exact_delta"}
    command = (await service.client.post("/v1/runs/b/one/commands", json=order)).json()["id"]
    paths = [path for path, item in service.app.openapi()["paths"].items() if "get" in item]
    store = service.app.state.store
    async with store.large.turn("x"), store.large.turn("x"), store.small.turn("x"), store.small.turn("x"):
        tasks = {
            path: asyncio.create_task(service.client.get(path.format(run="b/one", command=command), params=QUERY))
            for path in paths
            if path not in WITHOUT_THE_STORE
        }
        await asyncio.sleep(0.3)
        assert len(tasks) > 8
        assert [path for path, task in tasks.items() if task.done()] == []
    responses = await asyncio.gather(*tasks.values())
    assert [response.status_code for response in responses] == [200] * len(tasks)


@pytest.mark.promise("S4")
async def test_batches_are_stored_while_readers_use_every_connection(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(), rank.sample(1))
    engine = service.app.state.store.reader.engine
    with ExitStack() as connections:
        for _ in range(engine.pool.size()):
            connections.enter_context(engine.begin())
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
@pytest.mark.promise("S4")
@pytest.mark.usefixtures("both_databases")
async def test_large_responses_are_built_outside_the_event_loop(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, threads_by_call = threading.get_ident(), defaultdict[str, set[int]](set)

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads_by_call[name].add(threading.get_ident())
            return original(*args, **kwargs)

        return call

    for owner, name in ((Response, "model_dump_json"), (Connection, "execute"), (exposition, "line")):
        monkeypatch.setattr(owner, name, recorded(name, getattr(owner, name)))

    rank = FakeRank(layers=160, heads=range(40))
    await service.store(rank, rank.started())
    for step in range(1, 4):
        await service.store(rank, rank.sample(step))
    for path in LARGE:
        threads_by_call.clear()
        response = await service.client.get(path)
        assert response.status_code == 200
        assert threads_by_call["execute"]
        assert threads_by_call["line" if path == "/metrics" else "model_dump_json"]
        assert all(loop not in threads for threads in threads_by_call.values()), path
