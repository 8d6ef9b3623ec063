import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from foreshock.contract.wire import MAX_EVENTS, Array, Sample
from foreshock.server.testing import FakeRank

SECRET = "a-secret-of-sixteen-or-more"


def test_a_stored_batch_is_acknowledged_and_shown(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        ack = await service.store(rank, rank.started(), rank.sample(10, since=0))
        assert (ack.boot, ack.acknowledged, ack.commands) == ("b1", 1, ())
        [run] = (await service.get("/v1/runs"))["runs"]
        assert (run["run"], run["status"], run["last_step"], run["loss"]) == ("run-1", "active", 10, 3.0)

    play(story)


@pytest.mark.promise("S2")
def test_a_repeated_batch_is_acknowledged_again_and_changes_nothing(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        batch = rank.batch(rank.started(), rank.sample(10), rank.verdict(10))
        first, again = await service.post(batch), await service.post(batch)
        assert first.json() == again.json()
        both = await asyncio.gather(*(service.post(rank.batch(rank.sample(20), sequence=2)) for _ in range(5)))
        assert [answer.status_code for answer in both] == [200] * 5
        assert (await service.get("/v1/runs/run-1/series", metric="run.loss"))["lines"][0]["steps"] == [10, 20]
        assert len((await service.get("/v1/runs/run-1/events"))["events"]) == 2
        assert service.app.state.counters.batches == {"stored": 2, "duplicate": 5, "refused": 0, "busy": 0, "quota": 0}

    play(story)


@pytest.mark.promise("S3")
@pytest.mark.parametrize("position", range(4))
def test_one_bad_event_at_any_position_refuses_the_whole_batch(play: Any, position: int) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        body = json.loads(rank.batch(rank.started(), *(rank.sample(s) for s in (1, 2, 3))).model_dump_json())
        body["events"][position]["step"] = -1
        answer = await service.client.post("/v1/batches", json=body)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        [error] = answer.json()["errors"]
        assert error["where"].startswith(f"events.{position}.")
        assert (await service.get("/v1/runs"))["runs"] == []

    play(story)


def test_a_batch_with_many_errors_names_ten_of_them(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        body = json.loads(rank.batch(*(rank.sample(s) for s in range(1, 15))).model_dump_json())
        for event in body["events"]:
            event["since_step"] = -1
        answer = await service.client.post("/v1/batches", json=body)
        assert len(answer.json()["errors"]) == 10
        assert [error["where"] for error in answer.json()["errors"]] == [
            f"events.{i}.sample.since_step" for i in range(10)
        ]

    play(story)


HOSTILE = {
    "nothing": b"",
    "not JSON": b"\x80abc",
    "nested too deep": b"[" * 100_000,
    "a number too large": b'{"wire":1,"run":"r","rank":1e400,"boot":"b","sequence":1,"events":[]}',
    "NaN literal": b'{"wire":1,"run":"r","rank":NaN,"boot":"b","sequence":1,"events":[]}',
    "a lone surrogate": b'{"wire":1,"run":"\\ud800","rank":0,"boot":"b","sequence":1,"events":[]}',
    "another wire version": b'{"wire":2,"run":"r","rank":0,"boot":"b","sequence":1,"events":[]}',
    "markup as a name": b'{"wire":1,"run":"<img onerror=x>","rank":0,"boot":"b","sequence":1,"events":[]}',
    "a path as a name": b'{"wire":1,"run":"..\\\\..","rank":0,"boot":"b","sequence":1,"events":[]}',
    "no events": b'{"wire":1,"run":"r","rank":0,"boot":"b","sequence":1,"events":[]}',
    "a list": b"[]",
}


@pytest.mark.promise("S5")
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bodies_are_refused_with_a_problem(play: Any, body: bytes) -> None:
    async def story(service: Any) -> None:
        answer = await service.client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (415, 422)
        assert answer.json()["status"] == answer.status_code

    play(story)


@pytest.mark.promise("S5")
def test_bodies_that_are_too_large_compressed_or_not_json_are_refused(play: Any) -> None:
    async def story(service: Any) -> None:
        async def drip() -> Any:
            for _ in range(100):
                yield b" " * 100

        def post(**kind: Any) -> Any:
            return service.client.post("/v1/batches", **kind)

        json_type = {"content-type": "application/json"}
        large = await post(content=b" " * 5000, headers=json_type)
        chunked = await post(content=drip(), headers=json_type)
        assert [large.status_code, chunked.status_code] == [413, 413]
        assert large.headers["content-type"] == chunked.headers["content-type"] == "application/problem+json"
        packed = await post(content=b"{}", headers={**json_type, "content-encoding": "gzip"})
        plain = await post(content=b"{}", headers={"content-type": "text/plain"})
        assert [packed.status_code, plain.status_code] == [415, 415]

    play(story, max_body_bytes=4096)


def test_what_is_not_finite_arrives_and_is_shown(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1, loss=math.inf), rank.sample(2, loss=math.nan))
        [line] = (await service.get("/v1/runs/run-1/series", metric="run.loss"))["lines"]
        assert line["last"] == ["Infinity", "NaN"]
        metrics = (await service.client.get("/metrics")).text
        assert 'foreshock_run_loss{run="run-1"} NaN' in metrics

    play(story)


def test_samples_without_arrays_or_start_are_stored_and_read_once_the_start_arrives(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.post(rank.batch(rank.sample(5), sequence=2))
        bare = Sample(step=6, since_step=5, unix_seconds=0.0, query_norm=Array.of(np.ones(6, dtype=np.float32)))
        await service.post(rank.batch(bare, sequence=3))
        assert (await service.get("/v1/runs/run-1/matrix", metric="head.score_max"))["values"] == []
        await service.post(rank.batch(rank.started(), sequence=1))
        shown = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=5)
        assert np.array(shown["values"]).shape == (2, 3)
        unseen = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=6)
        assert unseen["values"] == [[None] * 3] * 2

    play(story)


@pytest.mark.promise("S1")
def test_a_store_that_fails_answers_503_and_acknowledges_nothing(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()

        async def full(*_: Any) -> None:
            raise OperationalError("COMMIT", None, OSError("database or disk is full"))

        with monkeypatch.context() as patch:
            patch.setattr("foreshock.server.ingest.batches.exchange", full)
            answer = await service.post(rank.batch(rank.started()))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await service.get("/v1/runs"))["runs"] == []
        assert (await service.post(rank.batch(rank.started(), sequence=1))).status_code == 200

    play(story)


@pytest.mark.promise("S1")
def test_a_batch_whose_client_leaves_while_it_waits_is_stored_once_and_holds_up_nobody(play: Any) -> None:
    async def story(service: Any) -> None:
        leaving, staying = FakeRank(rank=0), FakeRank(rank=1)
        writer = service.app.state.writer
        async with service.app.state.store.write():  # the writer waits
            left = asyncio.create_task(service.post(leaving.batch(leaving.sample(1))))
            stayed = asyncio.create_task(service.post(staying.batch(staying.sample(1))))
            while sum(writer._held.values()) < 2:
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        assert (await stayed).status_code == 200
        assert (await service.post(leaving.batch(leaving.sample(1), sequence=1))).status_code == 200
        counted = service.app.state.counters.batches
        assert (counted["stored"], counted["duplicate"]) == (2, 1)

    play(story)


@pytest.mark.parametrize(
    ("fault", "status"), [(RuntimeError("a bug"), 500), (OperationalError("SELECT", None, OSError("gone")), 503)]
)
def test_a_fault_on_the_way_of_a_batch_is_a_problem_and_passes(
    play: Any, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int
) -> None:
    async def failing(*_: Any) -> None:
        raise fault

    async def story(service: Any) -> None:
        rank = FakeRank()
        first = rank.batch(rank.sample(1))
        service.client.headers["authorization"] = f"Bearer {SECRET}"
        places = ((service.app.state.quotas, "admit"), (service.app.state.keyring, "caller"))
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

    play(story, token=SECRET)


@pytest.mark.promise("S4")
def test_more_batches_than_the_queue_takes_get_429_and_the_rest_is_stored(play: Any) -> None:
    async def story(service: Any) -> None:
        ranks = [FakeRank(rank=number) for number in range(60)]
        answers = await asyncio.gather(*(service.post(r.batch(r.started(), r.sample(1))) for r in ranks))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)
        assert service.app.state.counters.batches["busy"] == codes.count(429)
        async with service.app.state.store.read() as connection:
            stored = (await connection.execute(text("SELECT count(*) FROM batches"))).scalar()
        assert stored == codes.count(200)
        assert (await service.post(FakeRank(rank=99).batch(ranks[0].started()))).status_code == 200

    play(story, ingest_queue_batches=8, commit_batches=2)


@pytest.mark.promise("S12")
def test_a_noisy_run_is_slowed_down_and_a_quiet_one_is_not(play: Any) -> None:
    async def story(service: Any) -> None:
        noisy, quiet = FakeRank(run="noisy"), FakeRank(run="quiet")
        codes = [(await service.post(noisy.batch(noisy.sample(step)))).status_code for step in range(1, 30)]
        assert codes[0] == 200
        assert codes[-1] == 429
        assert (await service.post(quiet.batch(quiet.sample(1)))).status_code == 200

    play(story, run_batches_per_second=5.0)


def test_a_run_named_like_an_address_is_refused_with_a_sentence(play: Any) -> None:
    async def story(service: Any) -> None:
        paths = [path for path in service.app.openapi()["paths"] if path.startswith("/v1/runs/{run}/")]
        assert len(paths) == 9
        for word in (path.rpartition("/")[2] for path in paths):
            rank = FakeRank(run=f"team/{word}")
            answer = await service.post(rank.batch(rank.started()))
            assert answer.status_code == 422
            assert f"may not end in /{word}" in answer.json()["detail"]

    play(story)


def test_the_largest_batch_is_taken(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, *(rank.sample(step) for step in range(1, MAX_EVENTS + 1)))
        [line] = (await service.get("/v1/runs/run-1/series", metric="run.loss", max_points=10_000))["lines"]
        assert line["steps"] == list(range(1, MAX_EVENTS + 1))

    play(story)


@pytest.mark.promise("S3")
def test_a_batch_that_cannot_be_stored_is_refused_and_holds_up_nobody(play: Any) -> None:
    async def story(service: Any) -> None:
        good, bad = FakeRank(rank=0), FakeRank(rank=1)
        huge = [
            Sample(step=step, since_step=step - 1, unix_seconds=0.0, loss_nonfinite_steps=2**53)
            for step in range(1, MAX_EVENTS + 1)
        ]
        await service.store(bad, *huge)  # 2**62 by now; twice as much is no 64-bit number
        answers = await asyncio.gather(service.post(bad.batch(*huge)), service.post(good.batch(good.sample(1))))
        assert [answer.status_code for answer in answers] == [422, 200]
        assert "too large" in answers[0].json()["detail"]

    play(story)


@pytest.mark.promise("S13")
def test_control_characters_in_texts_reach_no_log_line(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.verdict(1, sentence="a\nb\x00c\u202ed <img onerror=x>"))
        newest = (await service.get("/v1/runs/run-1/events"))["events"][0]
        assert newest["sentence"] == "a\ufffdb\ufffdc\ufffdd <img onerror=x>"

    play(story)


@pytest.mark.promise("S13")
def test_refused_batches_are_logged_with_the_reason_once_in_a_while(play: Any, monkeypatch: Any) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(
        "foreshock.server.ingest.endpoint.log.warning", lambda *args, **fields: logged.append((args, fields))
    )

    async def story(service: Any) -> None:
        body = json.loads(FakeRank().batch(FakeRank().sample(1)).model_dump_json()) | {"run": "a\nb<img>"}
        for _ in range(50):
            assert (await service.client.post("/v1/batches", json=body)).status_code == 422
        assert service.app.state.counters.batches["refused"] == 50

    play(story)
    [(_, fields)] = logged
    assert "run: " in fields["why"]
    assert "is not an identifier" in fields["why"]
    assert "\n" not in fields["why"]
