"""The event stream: live events, replay after a reconnect, and its end."""

import asyncio
import gc
import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from foreshock.contract.wire import Event
from foreshock.server.http.stream import _send_events
from foreshock.server.runs.broadcast import Client
from foreshock.server.testing import FakeRank, LiveService, post


def send(client: httpx.Client, rank: FakeRank, *events: Event) -> None:
    post(client, rank.batch(*events)).raise_for_status()


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


def test_events_arrive_live_and_reconnecting_client_gets_missed_events(live_service: LiveService) -> None:
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
def test_service_stops_cleanly_with_listening_client(live_service: LiveService) -> None:
    rank = FakeRank()
    with (
        live_service.client() as client,
        live_service.client() as listener,
        listener.stream("GET", "/v1/stream") as response,
    ):
        send(client, rank, rank.started())
        assert next(events_of(response))["event"] == "started"
        assert live_service.stop(timeout_seconds=10) == 0


@contextmanager
def training(client: httpx.Client) -> Iterator[None]:
    """Send a sample of a run twenty times a second during the `with` block."""
    rank, stopped = FakeRank(), threading.Event()

    def train() -> None:
        step = 0
        while not stopped.wait(0.05):
            step += 1
            send(client, rank, rank.sample(step))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.mark.promise("S7")
@pytest.mark.parametrize("busy", [False, True], ids=["quiet", "busy"])
def test_stream_ends_with_its_own_session_only(tmp_path: Path, busy: bool) -> None:
    secret = "a-secret-of-sixteen-or-more"
    with (
        LiveService(tmp_path, {"FORESHOCK_TOKEN": secret}, stream_ping_seconds=0.3) as live,
        live.client(secret) as bearer,
        live.client() as ends,
        live.client() as stays,
    ):
        csrf = {"x-csrf-token": ends.post("/v1/login", json={"token": secret}).json()["csrf_token"]}
        stays.post("/v1/login", json={"token": secret})
        with ExitStack() as stack:
            first, second, third = (
                stack.enter_context(client.stream("GET", "/v1/stream", timeout=5.0)).iter_lines()
                for client in (ends, stays, bearer)
            )
            for lines in (first, second, third):
                assert next(lines) == ": listening"
            assert ends.post("/v1/logout", headers=csrf, timeout=5.0).status_code == 200
            if busy:
                stack.enter_context(training(bearer))
            assert len(list(islice(first, 120))) < 120  # the stream ends soon
            send(bearer, FakeRank(run="news"), FakeRank(run="news").started())
            for lines in (second, third):
                assert any('"run":"news"' in line for line in lines)


@pytest.mark.full
@pytest.mark.promise("S17")
async def test_client_disconnecting_during_replay_leaves_no_task_behind(service: Any) -> None:
    """Streams are cancelled as the framework does it: at each iteration of the event loop until they end."""
    random_delay = random.Random(7)

    async def may_read() -> bool:
        return True

    rank, errors = FakeRank(), []
    for first in range(1, 2000, 500):
        await service.store(rank, *(rank.verdict(n, name=f"warn-{n}") for n in range(first, first + 500)))
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    for _ in range(60):
        client = Client(None, "", "ann", asyncio.Queue(8), resumes=True)
        with anyio.move_on_after(random_delay.uniform(0.0, 0.05)):
            async for _ in _send_events(service.app.state.broadcaster, client, may_read):
                pass
    await asyncio.sleep(0.1)
    gc.collect()
    assert errors == []
