"""The one writer: a batch is stored once, acknowledged after its commit, and one that fails holds up nobody."""

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
    both = await asyncio.gather(*(service.post(rank.batch(rank.sample(20), sequence=2)) for _ in range(5)))
    assert [answer.status_code for answer in both] == [200] * 5
    assert (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"][0]["steps"] == [10, 20]
    told = (await service.get("/v1/runs/run-1/events"))["events"]
    assert sorted(event["kind"] for event in told) == ["incident", "started", "verdict"]
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
        answer = await service.post(rank.batch(rank.started()))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert (await service.get("/v1/runs"))["runs"] == []
    assert (await service.post(rank.batch(rank.started(), sequence=1))).status_code == 200


@pytest.mark.promise("S1")
async def test_batch_of_disconnected_client_is_stored_once_and_blocks_nobody(service: Any) -> None:
    leaving, staying = FakeRank(rank=0), FakeRank(rank=1)
    with service.app.state.store.writer.engine.begin():  # the writer waits
        left = asyncio.create_task(service.post(leaving.batch(leaving.sample(1))))
        stayed = asyncio.create_task(service.post(staying.batch(staying.sample(1))))
        for _ in range(500):  # both are within the service by then
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
    for place, name in places:  # within the gate, and the gate itself
        with monkeypatch.context() as patch:
            patch.setattr(place, name, failing)
            answer = await service.post(first)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "bug" not in answer.text
        assert "gone" not in answer.text
    assert (await service.post(first)).status_code == 200


@pytest.mark.promise("S4")
@pytest.mark.settings(ingest_queue_batches=8, commit_batches=2)
async def test_batches_beyond_queue_size_get_429_and_the_rest_is_stored(service: Any) -> None:
    ranks = [FakeRank(rank=number) for number in range(60)]
    answers = await asyncio.gather(*(service.post(r.batch(r.started(), r.sample(1))) for r in ranks))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429}
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)
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
    await service.store(bad, *huge)  # 2**62 by now; twice as much is no 64-bit number
    answers = await asyncio.gather(service.post(bad.batch(*huge)), service.post(good.batch(good.sample(1))))
    assert [answer.status_code for answer in answers] == [422, 200]
    assert "too large" in answers[0].json()["detail"]


@pytest.mark.parametrize("described", [True, False])
async def test_group_of_batches_takes_as_many_queries_as_one_batch(service: Any, described: bool) -> None:
    """Also of processes that have not said which heads they watch, whose samples must agree all the same."""
    store, said = service.app.state.store, list[str]()
    ranks = [FakeRank(rank=number) for number in range(20)]
    for rank in ranks:
        await service.store(rank, *([rank.started()] if described else []), rank.sample(1))
    event.listen(store.writer.engine, "before_cursor_execute", lambda *given: said.append(given[2]))

    async def queries(senders: list[FakeRank], step: int) -> int:
        group = [rank.batch(rank.sample(step)) for rank in senders]
        said.clear()
        done = await store.write(lambda connection: record(connection, group, defaultdict(Arrival)))
        assert len(done.new) == len(group)
        return len(said)

    await queries(ranks, 2)  # a topology is read once
    assert await queries(ranks, 3) == await queries(ranks[:1], 4) < 10


WIDE, NARROW, BLIND = (FakeRank(layers=number) for number in (2, 1, 0))
OF_NO_HEAD = WIDE.sample(1).model_copy(update={"states": None, "modes": None, "risk": None})


@pytest.mark.promise("S3")
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ([WIDE.started(), OF_NO_HEAD, WIDE.sample(2)], None),
        ([OF_NO_HEAD, WIDE.sample(2), WIDE.started(), WIDE.sample(3)], None),
        ([WIDE.started(), NARROW.started(), NARROW.sample(2)], None),
        ([WIDE.started(), NARROW.sample(2)], "data for 3 heads, but this process registered 6"),
        ([WIDE.sample(2), OF_NO_HEAD, NARROW.sample(3)], "data for 3 heads, but this process registered 6"),
        ([WIDE.sample(2), NARROW.started()], "registers 3 heads, but its earlier samples have data for 6"),
        ([WIDE.started(), WIDE.sample(2), NARROW.started()], "registers 3 heads"),
        ([BLIND.started(), OF_NO_HEAD, WIDE.sample(2)], "data for 6 heads, but this process registered 0"),
        ([OF_NO_HEAD, WIDE.sample(2), BLIND.started()], "registers 0 heads"),
    ],
)
async def test_sample_must_match_the_registered_heads_of_its_process(
    service: Any, said: list[Event], refusal: str | None, together: bool
) -> None:
    """What differs is refused, whether it comes in one batch or in several; which head is which would be unknown."""
    parts = [said] if together else [[event] for event in said]
    sender = FakeRank()
    answers = [await service.post(sender.batch(*part)) for part in parts]
    assert [answer.status_code for answer in answers] == [200] * (len(parts) - 1) + [422 if refusal else 200]
    assert refusal is None or refusal in answers[-1].json()["detail"]
