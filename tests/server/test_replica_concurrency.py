"""Several replicas on one PostgreSQL, everything at once: they wait for one another, and never deadlock."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import select
from tests.server.postgresql import deadlocks, new_database

from foreshock.contract.wire import Ack
from foreshock.server.store.schema import events
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.servers


async def with_replicas(
    url: str, player: Any, count: int, story: Callable[[Sequence[Any]], Awaitable[None]], **settings: Any
) -> None:
    replicas: list[Any] = []

    async def inner(service: Any) -> None:
        replicas.append(service)
        if len(replicas) < count:
            await player(url, inner, migrate=True, **settings)
        else:
            await story(replicas)

    await player(url, inner, migrate=True, **settings)


async def until_stored(service: Any, batch: Any) -> Ack:
    """Send as an agent does: again, while the service says that it is busy."""
    while (answer := await service.post(batch)).status_code == 429:
        await asyncio.sleep(0.1)
    assert answer.status_code == 200, answer.text
    return Ack.model_validate_json(answer.content)


@pytest.mark.promise("S2")
def test_ranks_starting_on_all_replicas_cause_no_deadlock(
    postgres: str, player: Any, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    number = sizes("ranks_at_once", quick=48, long=256)
    ranks = [FakeRank(run="job", rank=rank, layers=1, heads=(0, 1)) for rank in range(number)]

    async def story(replicas: Sequence[Any]) -> None:
        for turn in range(3):
            batches = [r.batch(r.started() if turn == 0 else r.verdict(turn), r.sample(turn + 1)) for r in ranks]
            await asyncio.gather(*(until_stored(replicas[i % 3], batch) for i, batch in enumerate(batches)))
        assert len((await replicas[0].get("/v1/runs/job"))["warnings"]) == number

    async def look() -> None:
        url = await new_database(postgres)
        await with_replicas(url, player, 3, story, commit_batches=4)  # many small commits at the same time
        assert await deadlocks(url) == 0

    asyncio.run(look())
    record_property("ranks that start at once", number)


@pytest.mark.full
@pytest.mark.promise("S11")
@pytest.mark.promise("S21")
def test_concurrent_orders_and_answers_cause_no_deadlock_or_duplicate_event_number(
    postgres: str, player: Any, record_property: Callable[[str, Any], None]
) -> None:
    ranks = [FakeRank(run=f"job-{number % 2}", rank=number // 2, layers=1) for number in range(12)]

    async def story(replicas: Sequence[Any]) -> None:
        for rank in ranks:
            await until_stored(replicas[0], rank.batch(rank.started(policy="approve"), rank.sample(1)))

        async def train(rank: FakeRank, number: int) -> None:
            for step in range(2, 14):
                where = replicas[(number + step) % 2]
                batch = rank.batch(rank.sample(step), rank.verdict(step, name=f"w-{number}-{step}"))
                ack, *_ = await asyncio.gather(until_stored(where, batch), *(until_stored(r, batch) for r in replicas))
                if ack.commands:
                    answer = rank.batch(*(rank.answer(command, step) for command in ack.commands))
                    await asyncio.gather(*(until_stored(r, answer) for r in replicas))

        async def order(run: str, where: Any, other: Any) -> None:
            for turn in range(12):
                body: dict[str, Any] = {
                    "who": "ann",
                    "reason": "drift",
                    "heads": [[0, turn % 3]],
                    "mode": "exact_delta",
                }
                body["expires_in_seconds"] = 0.05 if turn % 3 == 0 else 60
                key = {"idempotency-key": f"{run}-{turn}"}
                address = f"/v1/runs/{run}/commands"
                both = [replica.client.post(address, json=body, headers=key) for replica in (where, other)]
                answers = await asyncio.gather(*both)
                assert sorted(answer.status_code for answer in answers) == [200, 201], [a.text for a in answers]
                assert len({answer.json()["id"] for answer in answers}) == 1
                undo = {"who": "bob", "reason": "too early"}
                path = f"/v1/commands/{answers[0].json()['id']}/undo"
                undone = await asyncio.gather(*(r.client.post(path, json=undo) for r in (where, other)))
                assert {answer.status_code for answer in undone} <= {201, 409}

        working = [train(rank, number) for number, rank in enumerate(ranks)]
        working += [order("job-0", *replicas), order("job-1", *reversed(replicas))]
        await asyncio.gather(*working)
        with replicas[0].app.state.store.reader.engine.begin() as connection:
            of_runs = select(events.c.run_id, events.c.number).order_by(events.c.id)
            numbers = connection.execute(of_runs).all()
        for run_id in {run_id for run_id, _ in numbers}:
            own = [number for other, number in numbers if other == run_id]
            assert own == list(range(1, len(own) + 1))
        record_property("events numbered by two replicas", len(numbers))

    async def look() -> None:
        url = await new_database(postgres)
        await with_replicas(url, player, 2, story)
        assert await deadlocks(url) == 0

    asyncio.run(look())
