"""One token cannot take what all share: batches a second, runs, bytes in the store."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, func, select
from tests.faults.sending import eventually, send, started_sender
from tests.server.postgresql import new_database
from tests.server.test_auth import bearer
from tests.server.test_rotation import write

from foreshock.monitor.transport import sender
from foreshock.server.access import quotas
from foreshock.server.settings import Quota, Token
from foreshock.server.store.schema import runs, usage
from foreshock.server.testing import FakeRank, LiveService

SECRETS = {"greedy": "the-greedy-secret-0001", "modest": "the-modest-secret-0001"}


def tokens(**quota: Any) -> tuple[Token, ...]:
    """A token with this quota, and one with none."""
    return (
        Token.of("greedy", SECRETS["greedy"], ("ingest", "read"), quota=Quota(**quota)),
        Token.of("modest", SECRETS["modest"], ("ingest", "read")),
    )


async def sent(service: Any, rank: FakeRank, name: str = "greedy", sequence: int | None = None) -> httpx.Response:
    step = rank.sequence + 1
    body = rank.batch(rank.started(), rank.sample(step), sequence=sequence).model_dump_json()
    headers = {"content-type": "application/json", **bearer(SECRETS[name])}
    answer: httpx.Response = await service.client.post("/v1/batches", content=body, headers=headers)
    return answer


async def used(service: Any) -> dict[str, tuple[int, int]]:
    """(runs, bytes) in the store of every token that has some."""
    query = select(usage.c.token, func.count(), func.sum(usage.c.stored_bytes)).group_by(usage.c.token)
    async with service.app.state.store.read() as connection:
        return {token: (number, int(size)) for token, number, size in await connection.execute(query)}


def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "READ_AGAIN_SECONDS", 0.0)


def test_batches_a_second_are_counted_over_all_runs_of_a_token_and_leave_the_others_alone(play: Any) -> None:
    async def story(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-0"))).status_code == 200  # a burst is one batch at least
        refused = await sent(service, FakeRank(run="run-1"))
        assert refused.status_code == 429
        assert "more than 0.001 batches a second" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        for number in range(4):
            assert (await sent(service, FakeRank(run=f"modest-{number}"), "modest")).status_code == 200

    play(story, tokens=tokens(batches_per_second=0.001))


@pytest.mark.parametrize("again", [0.0, 3600.0])
def test_runs_are_limited_and_those_that_are_there_go_on(
    play: Any, monkeypatch: pytest.MonkeyPatch, again: float
) -> None:
    monkeypatch.setattr(quotas, "READ_AGAIN_SECONDS", again)

    async def story(service: Any) -> None:
        first, second, third = (FakeRank(run=f"run-{number}") for number in range(3))
        assert [(await sent(service, rank)).status_code for rank in (first, second, third)] == [200, 200, 429]
        answer = await sent(service, third)
        assert "has 2 of 2 runs in the store" in answer.json()["detail"]
        assert (await sent(service, first)).status_code == 200
        assert (await sent(service, third, "modest")).status_code == 200
        names = [
            run["run"]
            for run in (await service.client.get("/v1/runs", headers=bearer(SECRETS["modest"]))).json()["runs"]
        ]
        assert sorted(names) == ["run-0", "run-1", "run-2"]

    play(story, tokens=tokens(runs=2))


def test_a_run_that_is_deleted_makes_room(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_each_time(monkeypatch)

    async def story(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-0"))).status_code == 200
        assert (await sent(service, FakeRank(run="run-1"))).status_code == 429
        async with service.app.state.store.write() as connection:
            await connection.execute(delete(runs).where(runs.c.name == "run-0"))
        assert (await sent(service, FakeRank(run="run-1"))).status_code == 200
        assert list(await used(service)) == ["greedy"]

    play(story, tokens=tokens(runs=1))


def test_bytes_are_counted_once_for_each_batch_and_refused_beyond_the_quota(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_each_time(monkeypatch)
    rank = FakeRank(layers=4)
    size = len(rank.batch(rank.started(), rank.sample(1), sequence=1).model_dump_json())

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

    play(story, tokens=tokens(stored_bytes=int(3.5 * size)))


def test_a_quota_holds_after_a_restart(play: Any) -> None:
    async def first(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-0"))).status_code == 200

    async def again(service: Any) -> None:
        assert (await sent(service, FakeRank(run="run-1"))).status_code == 429

    play(first, tokens=tokens(runs=1))
    play(again, tokens=tokens(runs=1))


def test_without_a_token_nothing_is_counted(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(1))
        assert await used(service) == {}

    play(story)


def test_series_of_a_token_are_limited_state_and_step_first_and_the_others_are_whole(play: Any) -> None:
    texts: list[str] = []

    async def story(service: Any) -> None:
        for number in range(3):
            for name in SECRETS:
                rank = FakeRank(run=f"{name}-{number}", layers=3)
                assert (await sent(service, rank, name)).status_code == 200
        texts.append((await service.client.get("/metrics", headers=bearer(SECRETS["modest"]))).text)

    def series(text: str, name: str) -> list[str]:
        return sorted(line for line in text.splitlines() if f'run="{name}-' in line and "age" not in line)

    play(story, "free", tokens=tokens())
    play(story, "bound", tokens=tokens(series=40))
    free, bound = texts
    assert len(series(free, "greedy")) > 60
    assert len(series(bound, "greedy")) <= 40
    for number in range(3):
        assert f'foreshock_run_step{{run="greedy-{number}"}}' in bound
    names = [{line.split(" ")[0] for line in series(text, "modest")} for text in texts]
    assert names[0] == names[1]
    dropped = [line for line in bound.splitlines() if line.startswith("foreshock_service_series_dropped")]
    assert float(dropped[0].split()[-1]) >= len(series(free, "greedy")) - 40


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
                assert (await sent(second, FakeRank(run="run-0", rank=1))).status_code == 200
                async with service.app.state.store.read() as connection:
                    rows = (await connection.execute(select(usage))).all()
                assert [row.token for row in rows] == ["greedy"]

            await player(url, other, tokens=tokens(runs=1))

        await player(url, one, tokens=tokens(runs=1), migrate=True)

    asyncio.run(all_of_it())


@pytest.mark.full
def test_an_agent_keeps_what_is_beyond_its_quota_and_sends_it_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "retry_delay", lambda failures, retry_after: 0.05)
    file = tmp_path / "tokens"

    def allow(number: int) -> None:
        [entry, _] = tokens(runs=number)
        write(file, f"[{entry.model_dump_json()}]")

    allow(1)
    with LiveService(tmp_path, {"FORESHOCK_TOKENS_FILE": str(file)}) as service:
        client = service.client(SECRETS["greedy"])
        first = FakeRank(run="first")
        body = first.batch(first.started()).model_dump_json()
        headers = {"content-type": "application/json"}
        assert client.post("/v1/batches", content=body, headers=headers).status_code == 200
        agent = started_sender(service.url, tmp_path / "spool", token=SECRETS["greedy"], request_seconds=20.0)
        send(agent, *range(1, 9))
        eventually("the quota refuses", lambda: agent.retries > 2, seconds=60)
        assert [run["run"] for run in client.get("/v1/runs").json()["runs"]] == ["first"]
        allow(2)
        eventually("the second run is there", lambda: len(client.get("/v1/runs").json()["runs"]) == 2, seconds=60)
        eventually("its last step is there", lambda: client.get("/v1/runs/a-run").json()["last_step"] == 8, seconds=60)
        agent.close(20.0)
        assert not agent.dropped
        client.close()


def test_a_token_is_told_what_it_has_used_and_who_reads_every_run_what_all_have(play: Any) -> None:
    secrets = {name: f"the-secret-of-{name}-0001" for name in ("sender", "other", "team", "watcher")}
    known = (
        Token.of("sender", secrets["sender"], ("ingest",), "a/", quota=Quota(runs=3, stored_bytes=10**9)),
        Token.of("other", secrets["other"], ("ingest",), "b/"),
        Token.of("team", secrets["team"], ("read",), "a/"),
        Token.of("watcher", secrets["watcher"], ("read",)),
    )

    async def story(service: Any) -> None:
        sizes = dict.fromkeys(secrets, 0)
        for name, run in (("sender", "a/1"), ("sender", "a/2"), ("other", "b/1")):
            rank = FakeRank(run=run, layers=3)
            body = rank.batch(rank.started(), rank.sample(1)).model_dump_json()
            headers = {"content-type": "application/json", **bearer(secrets[name])}
            assert (await service.client.post("/v1/batches", content=body, headers=headers)).status_code == 200
            sizes[name] += len(body)

        async def told(name: str) -> dict[str, Any]:
            answer = await service.client.get("/v1/usage", headers=bearer(secrets[name]))
            return {entry.pop("token"): entry for entry in answer.json()["tokens"]}

        limits = {"batches_per_second": None, "runs": 3, "stored_bytes": 10**9, "series": None}
        assert await told("sender") == {"sender": {"runs": 2, "stored_bytes": sizes["sender"], "quota": limits}}
        assert {name: (entry["runs"], entry["stored_bytes"]) for name, entry in (await told("team")).items()} == {
            "team": (0, 0)
        }
        everybody = await told("watcher")
        assert {name: entry["stored_bytes"] for name, entry in everybody.items()} == sizes
        assert set(everybody["other"]["quota"].values()) == {None}

    play(story, tokens=known)
