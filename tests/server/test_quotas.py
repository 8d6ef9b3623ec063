"""One token cannot fill the store for the others."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, func, select
from tests.faults.sending import eventually, send, started_sender
from tests.server.postgresql import new_database
from tests.server.test_auth import bearer

from foreshock.contract.wire import Finished
from foreshock.monitor.transport import sender
from foreshock.server.access import quotas
from foreshock.server.settings import Token
from foreshock.server.store.schema import runs, usage
from foreshock.server.testing import FakeRank, LiveService

SECRETS = {"greedy": "the-greedy-secret-0001", "modest": "the-modest-secret-0001"}
TOKENS = tuple(Token.of(name, secret, ("ingest", "read", "delete")) for name, secret in SECRETS.items())


def size_of(rank: FakeRank) -> int:
    """Bytes of a batch as `sent` sends it."""
    return len(rank.batch(rank.started(), rank.sample(1), sequence=1).model_dump_json())


BOUND = int(1.5 * size_of(FakeRank()))
"""Room for one batch, and not for two."""


async def sent(service: Any, rank: FakeRank, name: str = "greedy", sequence: int | None = None) -> httpx.Response:
    step = rank.sequence + 1
    body = rank.batch(rank.started(), rank.sample(step), sequence=sequence).model_dump_json()
    headers = {"content-type": "application/json", **bearer(SECRETS[name])}
    answer: httpx.Response = await service.client.post("/v1/batches", content=body, headers=headers)
    return answer


async def used(service: Any) -> dict[str, tuple[int, int]]:
    """(runs, bytes) in the store of every token that has some."""
    query = select(usage.c.token, func.count(), func.sum(usage.c.stored_bytes)).group_by(usage.c.token)
    with service.app.state.store.reader.engine.begin() as connection:
        return {token: (number, int(size)) for token, number, size in connection.execute(query)}


def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "READ_AGAIN_SECONDS", 0.0)


def test_a_run_that_is_deleted_makes_room(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_each_time(monkeypatch)

    async def story(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-0"))).status_code == 200
        assert (await sent(service, FakeRank(run="run-1"))).status_code == 429
        with service.app.state.store.writer.engine.begin() as connection:
            connection.execute(delete(runs).where(runs.c.name == "run-0"))
        assert (await sent(service, FakeRank(run="run-1"))).status_code == 200
        assert list(await used(service)) == ["greedy"]

    play(story, tokens=TOKENS, token_stored_bytes=BOUND)


def test_bytes_are_counted_once_for_each_batch_and_refused_beyond_the_quota(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_each_time(monkeypatch)
    rank = FakeRank(layers=4)
    size = size_of(rank)

    async def story(service: Any) -> None:
        for _ in range(3):  # the same batch again and again is stored once
            assert (await sent(service, rank, sequence=1)).status_code == 200
        assert (await used(service))["greedy"][1] == pytest.approx(size, rel=0.02)
        assert [(await sent(service, rank)).status_code for _ in range(3)] == [200, 200, 429]
        refused = await sent(service, rank)
        assert "bytes in the store" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 60
        assert (await sent(service, FakeRank(run="other"), "modest")).status_code == 200
        counted = service.app.state.counters.batches
        assert counted["quota"] == 2
        assert (await used(service))["greedy"][1] <= 3.5 * size

    play(story, tokens=TOKENS, token_stored_bytes=int(3.5 * size))


def test_a_quota_holds_after_a_restart(play: Any) -> None:
    async def first(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-0"))).status_code == 200

    async def again(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-1"))).status_code == 429

    play(first, tokens=TOKENS, token_stored_bytes=BOUND)
    play(again, tokens=TOKENS, token_stored_bytes=BOUND)


def test_without_a_token_nothing_is_counted(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        assert await used(service) == {}

    play(story)


@pytest.mark.servers
def test_a_quota_holds_over_replicas_of_one_postgresql(
    postgres: str, player: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_each_time(monkeypatch)

    async def all_of_it() -> None:
        url = await new_database(postgres, "quotas")

        async def one(service: Any) -> None:
            async def other(second: Any) -> None:
                assert (await sent(service, FakeRank(run="run-0"))).status_code == 200
                assert (await sent(second, FakeRank(run="run-1"))).status_code == 429
                assert (await sent(second, FakeRank(run="run-1"), "modest")).status_code == 200
                with service.app.state.store.reader.engine.begin() as connection:
                    rows = connection.execute(select(usage)).all()
                assert [row.token for row in rows] == ["greedy", "modest"]

            await player(url, other, tokens=TOKENS, token_stored_bytes=BOUND)

        await player(url, one, tokens=TOKENS, token_stored_bytes=BOUND, migrate=True)

    asyncio.run(all_of_it())


@pytest.mark.full
def test_an_agent_keeps_what_is_beyond_its_quota_and_sends_it_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "retry_delay", lambda failures, retry_after: 0.05)
    greedy = Token.of("greedy", SECRETS["greedy"], ("ingest", "read", "delete"))
    first = FakeRank(run="first", layers=64)
    body = first.batch(first.started(), first.sample(1), Finished(step=1, unix_seconds=1.0, status="completed"))
    size = len(body.model_dump_json())
    bound = {"FORESHOCK_TOKENS": f"[{greedy.model_dump_json()}]", "FORESHOCK_TOKEN_STORED_BYTES": str(size)}
    with LiveService(tmp_path, bound) as service:
        client = service.client(SECRETS["greedy"])
        service.post(body, SECRETS["greedy"])
        agent = started_sender(service.url, tmp_path / "spool", token=SECRETS["greedy"], request_seconds=20.0)
        send(agent, *range(1, 9))
        eventually("the bound refuses", lambda: agent.retries > 2, seconds=60)
        assert [run["run"] for run in client.get("/v1/runs").json()["runs"]] == ["first"]
        deleted = client.delete("/v1/runs/first", params={"who": "ann", "reason": "room"})
        assert deleted.status_code == 204, deleted.text
        eventually("the other run is there", lambda: len(client.get("/v1/runs").json()["runs"]) == 1, seconds=60)
        eventually("its last step is there", lambda: client.get("/v1/runs/a-run").json()["last_step"] == 8, seconds=60)
        agent.close(20.0)
        assert not agent.dropped
        client.close()
