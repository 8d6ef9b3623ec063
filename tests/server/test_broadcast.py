"""What happens is handed to everybody who listens, and nobody who does not read holds up the others."""

import asyncio
from typing import Any

import pytest
from fastapi import sse

from foreshock.server.runs import broadcast
from foreshock.server.runs.broadcast import Client
from foreshock.server.testing import FakeRank


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
