"""The writer: each batch is stored once and acknowledged after its commit, and a failing batch blocks no other."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from foreshock.contract.wire import MAX_EVENTS, Event, Sample
from foreshock.server.process_order import Arrival
from foreshock.server.recorder import record
from foreshock.server.testing import FakeRank

SECRET = "a-secret-of-sixteen-or-more"


@pytest.mark.promise("S2")
async def test_repeated_batch_is_acknowledged_again_and_changes_nothing(service: Any, rank: FakeRank) -> None:
    batch = rank.batch(rank.started(), rank.sample(10), rank.verdict(10))
    first, again = await service.post(batch), await service.post(batch)
    assert first.json() == again.json()
    concurrent = await asyncio.gather(*(service.post(rank.batch(rank.sample(20), sequence=2)) for _ in range(5)))
    assert [response.status_code for response in concurrent] == [200] * 5
    assert (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"][0]["steps"] == [10, 20]
    events = (await service.get("/v1/runs/run-1/events"))["events"]
    assert sorted(entry["kind"] for entry in events) == ["incident", "started", "verdict"]
    assert service.app.state.counters.batches == {"stored": 2, "duplicate": 5, "refused": 0, "busy": 0}


@pytest.mark.promise("S5")
async def test_batch_sent_to_similar_path_is_not_found(service: Any, rank: FakeRank) -> None:
    body = rank.batch(rank.started()).model_dump(mode="json")
    for address in ("/v1/batches%0A", "/v1/batches/"):
        assert (await service.client.post(address, json=body)).status_code == 404, address
    assert (await service.get("/v1/runs"))["runs"] == []


@pytest.mark.promise("S1")
async def test_failing_store_returns_503_and_acknowledges_nothing(
    service: Any, rank: FakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*_: Any) -> None:
        raise OperationalError("COMMIT", None, OSError("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr("foreshock.server.endpoint.exchange", full)
        response = await service.post(rank.batch(rank.started()))
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert (await service.get("/v1/runs"))["runs"] == []
    assert (await service.post(rank.batch(rank.started(), sequence=1))).status_code == 200


@pytest.mark.promise("S1")
async def test_batch_of_disconnected_client_is_stored_once_and_blocks_nobody(service: Any) -> None:
    leaving, staying = FakeRank(rank=0), FakeRank(rank=1)
    with service.app.state.store.writer.engine.begin():  # blocks the writer
        left = asyncio.create_task(service.post(leaving.batch(leaving.sample(1))))
        stayed = asyncio.create_task(service.post(staying.batch(staying.sample(1))))
        for _ in range(500):  # until both requests wait for the writer
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
    assert (await stayed).status_code == 200
    assert (await service.post(leaving.batch(leaving.sample(1), sequence=1))).status_code == 200
    counted = service.app.state.counters.batches
    assert (counted["stored"], counted["duplicate"]) == (2, 1)


@pytest.mark.parametrize(
    ("fault", "status"), [(RuntimeError("a bug"), 500), (OperationalError("SELECT", None, OSError("gone")), 503)]
)
@pytest.mark.settings(token=SECRET)
async def test_fault_during_ingest_is_a_problem_response_and_is_temporary(
    service: Any, rank: FakeRank, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int
) -> None:
    async def failing(*_: Any) -> None:
        raise fault

    first = rank.batch(rank.sample(1))
    service.client.headers["authorization"] = f"Bearer {SECRET}"
    places = ((service.app.state.writer, "submit"), (service.app.state.keyring, "caller"))
    for place, name in places:  # behind the authentication, and the authentication itself
        with monkeypatch.context() as patch:
            patch.setattr(place, name, failing)
            response = await service.post(first)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "bug" not in response.text
        assert "gone" not in response.text
    assert (await service.post(first)).status_code == 200


@pytest.mark.promise("S4")
@pytest.mark.settings(ingest_queue_batches=8, commit_batches=2)
async def test_batches_beyond_queue_size_get_429_and_the_rest_is_stored(service: Any) -> None:
    ranks = [FakeRank(rank=number) for number in range(60)]
    responses = await asyncio.gather(*(service.post(r.batch(r.started(), r.sample(1))) for r in ranks))
    codes = [response.status_code for response in responses]
    assert set(codes) == {200, 429}
    assert all(int(a.headers["retry-after"]) >= 1 for a in responses if a.status_code == 429)
    assert service.app.state.counters.batches["busy"] == codes.count(429)
    with service.app.state.store.reader.engine.begin() as connection:
        stored = connection.execute(text("SELECT count(*) FROM batches")).scalar()
    assert stored == codes.count(200)
    assert (await service.post(FakeRank(rank=99).batch(ranks[0].started()))).status_code == 200


@pytest.mark.promise("S3")
async def test_batch_that_cannot_be_stored_is_refused_without_blocking_others(service: Any) -> None:
    good, bad = FakeRank(rank=0), FakeRank(rank=1)
    huge = [
        Sample(step=step, since_step=step - 1, unix_seconds=0.0, loss_nonfinite_steps=2**53)
        for step in range(1, MAX_EVENTS + 1)
    ]
    await service.store(bad, *huge)  # the sum is 2**62; twice as much does not fit into 64 bits
    responses = await asyncio.gather(service.post(bad.batch(*huge)), service.post(good.batch(good.sample(1))))
    assert [response.status_code for response in responses] == [422, 200]
    assert "too large" in responses[0].json()["detail"]


@pytest.mark.parametrize("described", [True, False])
async def test_group_of_batches_takes_as_many_queries_as_one_batch(service: Any, described: bool) -> None:
    """This includes processes without a start event, whose samples must still agree with each other."""
    store, statements = service.app.state.store, list[str]()
    ranks = [FakeRank(rank=number) for number in range(20)]
    for rank in ranks:
        await service.store(rank, *([rank.started()] if described else []), rank.sample(1))
    event.listen(store.writer.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))

    async def queries(senders: list[FakeRank], step: int) -> int:
        group = [rank.batch(rank.sample(step)) for rank in senders]
        statements.clear()
        done = await store.write(lambda connection: record(connection, group, defaultdict(Arrival)))
        assert len(done.new) == len(group)
        return len(statements)

    await queries(ranks, 2)  # the first batch also reads the topology
    assert await queries(ranks, 3) == await queries(ranks[:1], 4) < 10


WIDE, NARROW, EMPTY = (FakeRank(layers=number) for number in (2, 1, 0))
WITHOUT_HEADS = WIDE.sample(1).model_copy(update={"states": None, "modes": None, "risk": None})


@pytest.mark.promise("S3")
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("events", "refusal"),
    [
        ([WIDE.started(), WITHOUT_HEADS, WIDE.sample(2)], None),
        ([WITHOUT_HEADS, WIDE.sample(2), WIDE.started(), WIDE.sample(3)], None),
        ([WIDE.started(), NARROW.started(), NARROW.sample(2)], None),
        ([WIDE.started(), NARROW.sample(2)], "data for 3 heads, but this process registered 6"),
        ([WIDE.sample(2), WITHOUT_HEADS, NARROW.sample(3)], "data for 3 heads, but this process registered 6"),
        ([WIDE.sample(2), NARROW.started()], "registers 3 heads, but its earlier samples have data for 6"),
        ([WIDE.started(), WIDE.sample(2), NARROW.started()], "registers 3 heads"),
        ([EMPTY.started(), WITHOUT_HEADS, WIDE.sample(2)], "data for 6 heads, but this process registered 0"),
        ([WITHOUT_HEADS, WIDE.sample(2), EMPTY.started()], "registers 0 heads"),
    ],
)
async def test_sample_must_match_the_registered_heads_of_its_process(
    service: Any, events: list[Event], refusal: str | None, together: bool
) -> None:
    """Samples with another number of heads are refused, in one batch or in several: their heads would be ambiguous."""
    parts = [events] if together else [[event] for event in events]
    sender = FakeRank()
    responses = [await service.post(sender.batch(*part)) for part in parts]
    assert [response.status_code for response in responses] == [200] * (len(parts) - 1) + [422 if refusal else 200]
    assert refusal is None or refusal in responses[-1].json()["detail"]
