"""A token with only the ingest scope uses at most its share of the limits that all tokens share."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message
from tests.overrides import settings_with

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
    unused: Any = None
    batch = FakeRank().batch(FakeRank().started())

    writer = Writer(settings, unused, unused, unused)  # the writer is not started, so the queue fills
    writer._counters = Counters()
    waiting = [asyncio.create_task(writer.submit(batch, 100, "mallory", NO_HEADERS)) for _ in range(8)]
    await asyncio.sleep(0)
    assert writer.depth == 8
    with pytest.raises(ProblemError, match="Too many of your batches"):
        writer.refuse_when_full("mallory")
    for task in waiting[:4]:  # a disconnected client does not free its place in the queue
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
    unused: Any = None
    noisy, quiet = FakeRank(run="m/1"), FakeRank(run="a/1")
    large = noisy.batch(*(noisy.verdict(1, name=f"w-{number}") for number in range(512)))
    small = quiet.batch(quiet.started())

    writer = Writer(settings, unused, unused, unused)  # not started: the test inspects the groups that it would write
    waiting = [asyncio.create_task(writer.submit(large, 2**18, "mallory", NO_HEADERS)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(writer.submit(small, 100, "ann", NO_HEADERS)) for _ in range(2)]
    waiting += [asyncio.create_task(writer.submit(small, 2**25, "bob", NO_HEADERS)) for _ in range(3)]
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
    """The requests come from a token, a session of it, and unauthenticated clients of the login."""
    app = service.app
    login = await service.client.post("/v1/login", json={"token": MALLORY})
    cookie = {"cookie": login.headers["set-cookie"].partition(";")[0], "x-csrf-token": login.json()["csrf_token"]}
    kinds = [
        ("/v1/batches", {"authorization": f"Bearer {MALLORY}"}),
        ("/v1/batches", cookie),
        ("/v1/login", {}),
        ("/v1/login", {"authorization": "Bearer made-up-for-this-one"}),
    ]
    statuses: list[int] = []

    async def send_request(path: str, headers: dict[str, str], body: asyncio.Event) -> None:
        async def receive() -> Message:
            await body.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        all_headers = {"content-type": "application/json", "content-length": "99", **headers}
        raw = [(name.encode(), value.encode()) for name, value in all_headers.items()]
        scope = {"type": "http", "path": path, "method": "POST", "headers": raw, "query_string": b""}
        await app({**scope, "client": ("9.9.9.9", 1), "raw_path": path.encode()}, receive, send)

    never = asyncio.Event()
    unfinished = [asyncio.create_task(send_request(*kinds[number % 4], never)) for number in range(120)]
    async with asyncio.timeout(60):
        while len(statuses) < 120 - 16 - 8:  # the token may use half of 32, all unauthenticated clients a quarter
            await asyncio.sleep(0.01)
    assert set(statuses) == {429}
    batch = FakeRank(run="a/1").batch(FakeRank().started())
    headers = {"authorization": f"Bearer {ANN}", "content-type": "application/json"}
    assert (await service.post(batch, secret=ANN)).status_code == 200
    assert (await service.client.get("/v1/runs", headers=headers)).status_code == 200
    assert (await service.client.get("/readyz")).status_code == 200
    never.set()
    await asyncio.wait_for(asyncio.gather(*unfinished), 60)
    assert (await service.client.post("/v1/batches", content=b"{}", headers=headers)).status_code == 422


@pytest.mark.settings(tokens=TOKENS)
async def test_body_over_one_mebibyte_is_refused_except_for_batches(service: Any) -> None:
    headers = {"authorization": f"Bearer {MALLORY}", "content-type": "application/json"}
    for path in ("/v1/runs/a/job/commands", "/v1/webhooks/alertmanager", "/v1/logout", "/v1/nothing"):
        response = await service.client.post(path, content=b"[" * (2**20 + 1), headers=headers)
        assert response.status_code == 413, path
