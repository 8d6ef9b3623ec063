"""A token that may only ingest, whatever it sends and however much, makes no other client's request fail."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from foreshock.contract.wire import AgentHealth, Layer, Switched
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank, LiveService

pytestmark = pytest.mark.promise("S4")
MALLORY, ANN, READER = "secret-of-mallory-0", "secret-of-ann-000000", "secret-of-reader-000"
TOKENS = (
    Token.of("mallory", MALLORY, ("ingest",), "m/"),
    Token.of("ann", ANN, ("ingest", "read"), "a/"),
    Token.of("reader", READER, ("read",)),
)
SETTINGS = {
    "FORESHOCK_TOKENS": json.dumps([token.model_dump(mode="json") for token in TOKENS]),
    "FORESHOCK_CONNECTIONS": "128",
    "FORESHOCK_INGEST_QUEUE_BATCHES": "8",
    "FORESHOCK_COMMIT_BATCHES": "2",
    "FORESHOCK_MAX_SERIES": "300",
}
HEADERS = {"authorization": f"Bearer {MALLORY}", "content-type": "application/json"}


async def slow_bodies(url: str) -> None:
    """Requests whose body does not come, as many as the service lets in."""
    address = urlsplit(url)
    head = "POST /v1/batches HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    opened = []
    try:
        for _ in range(150):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            opened.append(writer)
            writer.write(f"{head}\r\n{{".encode())
        await asyncio.sleep(3600)
    finally:
        for writer in opened:
            writer.transport.abort()


async def post_for_ever(url: str, body_of: Callable[[int], str | bytes], senders: int = 6) -> None:
    """Bodies one after the other on many connections, as fast as they are answered."""

    async def send(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60, trust_env=False) as client:
            at = number
            while True:
                try:
                    await client.post("/v1/batches", content=body_of(at))
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
                at += senders

    await asyncio.gather(*(send(number) for number in range(senders)))


def flood(at: int) -> str:
    rank = FakeRank(run="m/flood", rank=at % 6)
    return rank.batch(rank.sample(at + 1), sequence=at + 1).model_dump_json()


def malformed(at: int) -> bytes:
    return (b"{" * 5000, b"[]" * 50_000, b'{"wire":1,"events":[' + b"{}," * 20_000 + b"{}]}", b"\xff" * 1000)[at % 4]


def many_runs(at: int) -> str:
    rank = FakeRank(run=f"m/run-{at}", layers=1)
    told = [rank.verdict(1, layer=0, head=head, name=f"w-{head}", severity="critical") for head in range(3)]
    lost = AgentHealth(step=1, dropped={f"why-{at}-{i}": 2**53 for i in range(200)})
    return rank.batch(rank.started(), rank.sample(1), *told, lost).model_dump_json()


def wide(at: int) -> str:
    rank = FakeRank(run=f"m/wide-{at % 7}", boot=f"b{at}")
    own = [Layer(layer=at * 50 + n, name="x", heads=(n,), kv_heads=1, head_dim=1, served_by="x") for n in range(50)]
    rank.layers, rank.count = tuple(own), 50
    heads = tuple((layer.layer, layer.heads[0]) for layer in own)
    names = ("nonsense",) * len(heads)
    switched = Switched(id="s", step=1, outcome="applied", heads=heads, before=names, after=names, reason="x")
    return rank.batch(rank.started(), rank.sample(2**36), switched).model_dump_json()


ATTACKS: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
    "bodies that do not come": slow_bodies,
    "a flood": lambda url: post_for_ever(url, flood),
    "nonsense": lambda url: post_for_ever(url, malformed),
    "many runs with many warnings": lambda url: post_for_ever(url, many_runs, 4),
    "layers without end": lambda url: post_for_ever(url, wide, 4),
}


@asynccontextmanager
async def under(attack: str, url: str) -> AsyncIterator[None]:
    task = asyncio.create_task(ATTACKS[attack](url))
    try:
        await asyncio.sleep(0.5)
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_request_of_others_fails(tmp_path: Path, attack: str) -> None:
    answers: Counter[tuple[str, int]] = Counter()

    async def story(url: str) -> None:
        ann = FakeRank(run="a/job")
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection that lies idle may be closed by anybody
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as client:

            async def ask(secret: str, path: str, body: str | None = None) -> str:
                headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
                answer = await (
                    client.get(path, headers=headers)
                    if body is None
                    else client.post(path, content=body, headers=headers)
                )
                answers[path.partition("?")[0], answer.status_code] += 1
                return answer.text

            await ask(ANN, "/v1/batches", ann.batch(ann.started(), ann.sample(1)).model_dump_json())
            async with under(attack, url):
                for step in range(2, 4):
                    batch = ann.batch(ann.sample(step), ann.verdict(step, severity="critical"))
                    await ask(ANN, "/v1/batches", batch.model_dump_json())
                    shown = await ask(READER, "/metrics")
                    assert 'foreshock_run_active{run="a/job"}' in shown
                    assert "foreshock_warning_active{" in shown
                    for path in ("/v1/runs", "/v1/runs/a/job", "/v1/runs/a/job/series?metric=head.score_max"):
                        await ask(READER, path)
                    own = await ask(ANN, "/metrics")
                    assert "m/" not in own
                    for path in ("/v1/runs/a/job/matrix?metric=head.score_max", "/v1/runs/a/job/events", "/healthz"):
                        await ask(ANN, path)
            for path in ("/metrics", "/v1/runs", "/v1/stream", "/v1/audit", "/v1/runs/m/flood"):
                refused = await client.get(path, headers={"authorization": f"Bearer {MALLORY}"})
                assert "lacks the scope" in refused.text

    with LiveService(tmp_path, SETTINGS) as service:
        asyncio.run(story(service.url))
    assert {status for _, status in answers} == {200}, answers
