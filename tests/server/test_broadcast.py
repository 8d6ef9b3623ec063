"""What happens is handed to everybody who listens, and nobody who does not read holds up the others."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import sse

from foreshock.server.runs import broadcast
from foreshock.server.runs.broadcast import Client
from foreshock.server.testing import FakeRank, LiveService


async def listen(url: str, path: str = "/v1/stream") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has been let in: its first words are read, and nothing else until the test does."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    await reader.readuntil(b": listening")
    return reader, writer


@pytest.mark.full
@pytest.mark.promise("S4")
def test_clients_that_never_read_do_not_hold_the_streams_of_others(tmp_path: Path) -> None:
    async def story(service: LiveService) -> None:
        silent = [await listen(service.url) for _ in range(4)]
        for _ in range(2):
            reader, writer = await listen(service.url)
            rank = FakeRank(boot=f"b{id(writer)}")
            async with httpx.AsyncClient(base_url=service.url, trust_env=False) as client:
                body = rank.batch(rank.started()).model_dump_json()
                await client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
            async with asyncio.timeout(20):
                await reader.readuntil(b"event: started")
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(20):
            last = await silent[0][0].readuntil(b"\r\n0\r\n\r\n")  # the oldest was ended for the first newcomer
        assert b"event: " not in last
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()

    with LiveService(tmp_path, stream_clients=4) as service:
        asyncio.run(story(service))


def clients_of(*owners: str) -> list[Client]:
    return [Client(None, "", (owner, "10.0.0.1"), asyncio.Queue(8)) for owner in owners]


@pytest.mark.settings(stream_clients=5)
async def test_whoever_holds_most_streams_gives_up_the_oldest_of_them_and_nobody_else_does(service: Any) -> None:
    broadcaster = service.app.state.broadcaster
    before = clients_of("ann", "mallory", "mallory", "bob", "mallory")
    for client in before:
        broadcaster.join(client)
    [ann, first, second, bob, third] = before
    [late, later] = clients_of("carol", "mallory")
    broadcaster.join(late)
    assert list(broadcaster.clients) == [ann, second, bob, third, late]
    broadcaster.join(later)
    assert list(broadcaster.clients) == [ann, bob, third, late, later]
    assert [client.lost for client in (ann, first, second, bob)] == [False, True, True, False]


async def test_an_event_is_written_once_for_five_hundred_clients_and_comes_to_each(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = sse.format_sse_event

    def counted(**given: Any) -> bytes:
        written.append(given["event"])
        return write(**given)

    broadcaster = service.app.state.broadcaster
    clients = clients_of(*(f"token-{number}" for number in range(500)))
    for client in clients:
        client.joined = 0
        broadcaster.join(client)
    monkeypatch.setattr(broadcast, "format_sse_event", counted)
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.verdict(1), rank.sample(1))
    async with asyncio.timeout(20):
        got = [[await client.waiting.get() for _ in range(4)] for client in clients]
    assert all(b"".join(told.written for told in own if told).count(b"event: ") == 4 for own in got)
    assert sorted(written) == ["incident", "sample", "started", "verdict"]
