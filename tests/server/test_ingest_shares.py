"""A token that may only ingest takes its share of what all tokens share, and no more."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message
from tests.constants import settings_with

from foreshock.server.endpoint import Writer
from foreshock.server.logs import Counters
from foreshock.server.problems import ProblemError
from foreshock.server.process_order import NO_HEADERS
from foreshock.server.settings import Settings, Token
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S4")
MALLORY, ANN = "secret-of-mallory-0", "secret-of-ann-000000"
TOKENS = (Token.of("mallory", MALLORY, ("ingest",), "m/"), Token.of("ann", ANN, ("ingest", "read"), "a/"))


async def test_token_filling_batch_queue_leaves_room_for_others() -> None:
    settings = settings_with(Settings, tokens=TOKENS, ingest_queue_batches=8)
    nobody: Any = None
    batch = FakeRank().batch(FakeRank().started())

    writer = Writer(settings, nobody, nobody, nobody)  # it never runs, so the queue fills
    writer._counters = Counters()
    waiting = [asyncio.create_task(writer.submit(batch, 100, "mallory", NO_HEADERS)) for _ in range(8)]
    await asyncio.sleep(0)
    assert writer.depth == 8
    with pytest.raises(ProblemError, match="Too many of your batches"):
        writer.refuse_when_full("mallory")
    for task in waiting[:4]:  # a client that leaves takes nothing out of the queue
        task.cancel()
    await asyncio.sleep(0)
    with pytest.raises(ProblemError, match="Too many of your batches"):
        writer.refuse_when_full("mallory")
    writer.refuse_when_full("ann")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_many_or_large_batches_delay_only_their_own_token() -> None:
    settings = Settings(tokens=TOKENS)
    nobody: Any = None
    loud, quiet = FakeRank(run="m/1"), FakeRank(run="a/1")
    words = loud.batch(*(loud.verdict(1, name=f"w-{number}") for number in range(512)))
    alone = quiet.batch(quiet.started())

    writer = Writer(settings, nobody, nobody, nobody)  # never runs: what it would write is seen
    waiting = [asyncio.create_task(writer.submit(words, 2**18, "mallory", NO_HEADERS)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(writer.submit(alone, 100, "ann", NO_HEADERS)) for _ in range(2)]
    waiting += [asyncio.create_task(writer.submit(alone, 2**25, "bob", NO_HEADERS)) for _ in range(3)]
    await asyncio.sleep(0)
    groups = []
    while writer.depth:
        groups.append("".join(item.token[0] for item in writer._next_group()))
    assert groups[:3] == ["mab", "mab", "mb"]
    assert groups[3:] == ["mm"] * 8 + ["m"]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.settings(tokens=TOKENS, requests_at_once=32)
async def test_unfinished_requests_leave_capacity_for_other_clients(service: Any) -> None:
    """Of a token, of a session of its, of a stranger at an address that needs no token."""
    app = service.app
    login = await service.client.post("/v1/login", json={"token": MALLORY})
    cookie = {"cookie": login.headers["set-cookie"].partition(";")[0], "x-csrf-token": login.json()["csrf_token"]}
    kinds = [
        ("/v1/batches", {"authorization": f"Bearer {MALLORY}"}),
        ("/v1/batches", cookie),
        ("/v1/login", {}),
        ("/v1/login", {"authorization": "Bearer made-up-for-this-one"}),
    ]
    answered: list[int] = []

    async def ask(path: str, headers: dict[str, str], body: asyncio.Event) -> None:
        async def receive() -> Message:
            await body.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered.append(message["status"])

        sent = {"content-type": "application/json", "content-length": "99", **headers}
        raw = [(name.encode(), value.encode()) for name, value in sent.items()]
        scope = {"type": "http", "path": path, "method": "POST", "headers": raw, "query_string": b""}
        await app({**scope, "client": ("9.9.9.9", 1), "raw_path": path.encode()}, receive, send)

    never = asyncio.Event()
    held = [asyncio.create_task(ask(*kinds[number % 4], never)) for number in range(120)]
    async with asyncio.timeout(60):
        while len(answered) < 120 - 16 - 8:  # half of 32 of the token, a quarter of all without one
            await asyncio.sleep(0.01)
    assert set(answered) == {429}
    batch = FakeRank(run="a/1").batch(FakeRank().started())
    headers = {"authorization": f"Bearer {ANN}", "content-type": "application/json"}
    assert (await service.post(batch, secret=ANN)).status_code == 200
    assert (await service.client.get("/v1/runs", headers=headers)).status_code == 200
    assert (await service.client.get("/readyz")).status_code == 200
    never.set()
    await asyncio.wait_for(asyncio.gather(*held), 60)
    assert (await service.client.post("/v1/batches", content=b"{}", headers=headers)).status_code == 422


@pytest.mark.settings(tokens=TOKENS)
async def test_body_over_one_mebibyte_is_refused_except_for_batches(service: Any) -> None:
    headers = {"authorization": f"Bearer {MALLORY}", "content-type": "application/json"}
    for path in ("/v1/runs/a/job/commands", "/v1/webhooks/alertmanager", "/v1/logout", "/v1/nothing"):
        answer = await service.client.post(path, content=b"[" * (2**20 + 1), headers=headers)
        assert answer.status_code == 413, path
