"""A token that may only ingest takes its share of what all tokens share, and no more."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from foreshock.server.access.problems import ProblemError
from foreshock.server.counters import Counters
from foreshock.server.http.connections import Room, Seats
from foreshock.server.ingest.arrivals import UNTOLD
from foreshock.server.ingest.batches import Writer
from foreshock.server.settings import Settings, Token
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S4")
MALLORY, ANN = "secret-of-mallory-0", "secret-of-ann-000000"
TOKENS = (Token.of("mallory", MALLORY, ("ingest",), "m/"), Token.of("ann", ANN, ("ingest", "read"), "a/"))


def test_a_token_that_fills_the_queue_of_batches_leaves_places_for_others() -> None:
    settings = Settings(tokens=TOKENS, ingest_queue_batches=8, ingest_queue_bytes=1024)
    nobody: Any = None
    batch = FakeRank().batch(FakeRank().started())

    async def story() -> None:
        writer = Writer(settings, nobody, nobody, nobody, nobody)  # it never runs, so the queue fills
        writer._counters = Counters()
        waiting = [asyncio.create_task(writer.submit(batch, 100, "mallory", UNTOLD)) for _ in range(8)]
        await asyncio.sleep(0)
        assert writer.depth == 8
        with pytest.raises(ProblemError, match="More batches wait"):
            writer.refuse_when_full("mallory")
        waiting += [asyncio.create_task(writer.submit(batch, 600, "ann", UNTOLD))]  # past the bytes, too
        await asyncio.sleep(0)
        assert writer.depth == 9
        with pytest.raises(ProblemError, match="More batches wait"):
            writer.refuse_when_full("ann", 600)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_token_whose_requests_never_end_leaves_half_of_the_room_for_others() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600 if (b"authorization", b"Bearer mallory") in scope["headers"] else 0)

    async def ask(room: Room, secret: bytes) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/v1/batches", "method": "POST", "headers": [(b"authorization", secret)]}
        await room(scope, None, send)  # type: ignore[arg-type]
        return sent

    async def story() -> None:
        room = Room(never, Seats(8))
        held = [asyncio.create_task(ask(room, b"Bearer mallory")) for _ in range(20)]
        while sum(task.done() for task in held) < 16:
            await asyncio.sleep(0)
        refused = [task.result() for task in held if task.done()]
        assert {sent[0]["status"] for sent in refused} == {503}
        assert await ask(room, b"Bearer ann") == []  # let through
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        again = asyncio.create_task(ask(room, b"Bearer mallory"))  # what has ended holds nothing
        await asyncio.sleep(0)
        assert not again.done()
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 60))
