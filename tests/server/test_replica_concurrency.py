"""Several replicas use one PostgreSQL concurrently without deadlocks."""

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


async def run_with_replicas(
    url: str, run_scenario_at: Any, count: int, scenario: Callable[[Sequence[Any]], Awaitable[None]], **settings: Any
) -> None:
    replicas: list[Any] = []

    async def inner(service: Any) -> None:
        replicas.append(service)
        if len(replicas) < count:
            await run_scenario_at(url, inner, migrate=True, **settings)
        else:
            await scenario(replicas)

    await run_scenario_at(url, inner, migrate=True, **settings)


async def until_stored(service: Any, batch: Any) -> Ack:
    """Send a batch as an agent does: retry while the service answers 429."""
    while (response := await service.post(batch)).status_code == 429:
        await asyncio.sleep(0.1)
    assert response.status_code == 200, response.text
    return Ack.model_validate_json(response.content)


@pytest.mark.promise("S2")
def test_ranks_starting_on_all_replicas_cause_no_deadlock(
    postgres: str, run_scenario_at: Any, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    number = sizes("ranks_at_once", quick=48, long=256)
    ranks = [FakeRank(run="job", rank=rank, layers=1, heads=(0, 1)) for rank in range(number)]

    async def scenario(replicas: Sequence[Any]) -> None:
        for turn in range(3):
            batches = [r.batch(r.started() if turn == 0 else r.verdict(turn), r.sample(turn + 1)) for r in ranks]
            await asyncio.gather(*(until_stored(replicas[i % 3], batch) for i, batch in enumerate(batches)))
        assert len((await replicas[0].get("/v1/runs/job"))["warnings"]) == number

    async def check() -> None:
        url = await new_database(postgres)
        await run_with_replicas(
            url, run_scenario_at, 3, scenario, commit_batches=4
        )  # many small commits at the same time
        assert await deadlocks(url) == 0

    asyncio.run(check())
    record_property("ranks that start together", number)


@pytest.mark.full
@pytest.mark.promise("S11")
@pytest.mark.promise("S21")
def test_concurrent_orders_and_answers_cause_no_deadlock_or_duplicate_event_number(
    postgres: str, run_scenario_at: Any, record_property: Callable[[str, Any], None]
) -> None:
    ranks = [FakeRank(run=f"job-{number % 2}", rank=number // 2, layers=1) for number in range(12)]

    async def scenario(replicas: Sequence[Any]) -> None:
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
                responses = await asyncio.gather(*both)
                assert sorted(response.status_code for response in responses) == [200, 201], [a.text for a in responses]
                assert len({response.json()["id"] for response in responses}) == 1
                undo = {"who": "bob", "reason": "too early"}
                path = f"/v1/commands/{responses[0].json()['id']}/undo"
                undone = await asyncio.gather(*(r.client.post(path, json=undo) for r in (where, other)))
                assert {response.status_code for response in undone} <= {201, 409}

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

    async def check() -> None:
        url = await new_database(postgres)
        await run_with_replicas(url, run_scenario_at, 2, scenario)
        assert await deadlocks(url) == 0

    asyncio.run(check())
