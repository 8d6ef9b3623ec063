"""The stream of events: live, continued where a client left it, and ended in order."""

import asyncio
import gc
import json
import random
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from foreshock.server.http.stream import _send_events
from foreshock.server.runs.broadcast import Client
from foreshock.server.testing import FakeRank, LiveService


def send(client: httpx.Client, rank: FakeRank, *events: object) -> None:
    batch = rank.batch(*events)  # type: ignore[arg-type]
    headers = {"content-type": "application/json"}
    assert client.post("/v1/batches", content=batch.model_dump_json(), headers=headers).status_code == 200


def events_of(response: httpx.Response) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in response.iter_lines():
        if line.startswith(":"):
            continue
        if not line:
            if event.get("event") not in (None, "incident"):
                yield event
            event = {}
        else:
            name, _, value = line.partition(": ")
            event[name] = value


def test_events_arrive_live_and_a_returning_client_gets_what_it_missed(live_service: LiveService) -> None:
    rank, other = FakeRank(), FakeRank(run="run-2")
    with live_service.client() as client, live_service.client() as listener:
        send(client, rank, rank.started())
        with listener.stream("GET", "/v1/stream", params={"run": "run-1"}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            stream = events_of(response)
            send(client, other, other.started(), other.sample(1))
            seen = []
            send(client, rank, rank.sample(1))
            for event in stream:
                seen.append(event)
                if event["event"] == "sample":
                    send(client, rank, rank.verdict(1))
                if event["event"] == "verdict":
                    break
        assert {json.loads(event["data"])["run"] for event in seen} == {"run-1"}
        assert next(event for event in seen if event["event"] == "sample").get("id") is None
        last = seen[-1]["id"]
        send(client, rank, rank.verdict(2, name="warn-2"))
        send(client, rank, rank.verdict(3, name="warn-3"))
        with listener.stream("GET", "/v1/stream", headers={"last-event-id": last}) as response:
            stream = events_of(response)
            missed = [json.loads(next(stream)["data"])["verdict"]["id"] for _ in range(2)]
        assert missed == ["warn-2", "warn-3"]


@pytest.mark.promise("S17")
def test_the_service_goes_down_in_order_with_a_client_still_listening(live_service: LiveService) -> None:
    rank = FakeRank()
    with (
        live_service.client() as client,
        live_service.client() as listener,
        listener.stream("GET", "/v1/stream") as response,
    ):
        send(client, rank, rank.started())
        assert next(events_of(response))["event"] == "started"
        assert live_service.stop(timeout_seconds=10) == 0


@pytest.mark.full
@pytest.mark.promise("S17")
def test_a_client_that_leaves_while_its_missed_events_are_read_leaves_no_task_behind(play: Any) -> None:
    """As the framework ends a stream: it cancels again at every turn of the event loop until the stream has ended."""
    leaves = random.Random(7)

    async def story(service: Any) -> None:
        rank, said = FakeRank(), []
        for first in range(1, 2000, 500):
            await service.store(rank, *(rank.verdict(n, name=f"warn-{n}") for n in range(first, first + 500)))
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        for _ in range(60):
            client = Client(None, "", ("ann", "10.0.0.1"), asyncio.Queue(8), resumes=True)
            with anyio.move_on_after(leaves.uniform(0.0, 0.05)):
                async for _ in _send_events(service.app.state.broadcaster, client):
                    pass
        await asyncio.sleep(0.1)
        gc.collect()
        assert said == []

    play(story)
