"""An attack with a token that has only the ingest scope does not change the responses to other clients."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest

from foreshock.contract.wire import AGE_HEADER, REPLAYED_HEADER, AgentHealth, Layer, Switched
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank, LiveService

MALLORY, ANN, READER, HOOK = (f"the-secret-of-{who}-0001" for who in ("mallory", "ann", "reader", "hook"))
TOKENS = (
    Token.of("mallory", MALLORY, ("ingest",), "m/"),
    Token.of("ann", ANN, ("ingest",), "a/"),
    Token.of("reader", READER, ("read",)),
    Token.of("hook", HOOK, ("act",)),
)
SETTINGS = {
    "FORESHOCK_TOKENS": json.dumps([token.model_dump(mode="json") for token in TOKENS]),
}
SMALL = {"requests_at_once": 64, "ingest_queue_batches": 8, "body_bytes_at_once": 32 * 2**20}
JSON: Final = {"content-type": "application/json"}
CONNECTIONS: Final = 40
"""Connections of each kind that the attack holds open."""
ATTACKER_ADDRESS: Final = "127.0.0.2"
"""Source address of the attack; the other clients use 127.0.0.1."""


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", **JSON}


# Requests of the attacker: each function returns (headers, body) for the number of the request.

AttackRequest = tuple[dict[str, str], bytes]


def flood(at: int) -> AttackRequest:
    rank = FakeRank(run="m/flood", rank=at % 6)
    return {}, rank.batch(rank.started(), rank.sample(at + 1), sequence=at + 1).model_dump_json().encode()


def nonsense(at: int) -> AttackRequest:
    bodies = (b"{" * 5000, b"[]" * 50_000, b'{"wire":1,"events":[' + b"{}," * 20_000 + b"{}]}", b"\xff" * 1000)
    return {}, bodies[at % len(bodies)]


def huge(at: int) -> AttackRequest:
    return {}, b'{"wire":1,"run":"m/huge","events":["' + b"x" * (8 * 2**20) + b'"]}'


def many_runs_with_warnings(at: int) -> AttackRequest:
    """Free text in identifiers, and very large counts."""
    rank = FakeRank(run=f"m/run-{at}", layers=1)
    words = {"signal": f"signal-{at}", "cause": "rounding", "severity": "critical", "sentence": "\x1b[2J" * 20}
    verdicts = [rank.verdict(1, layer=0, head=head, name=f"w-{head}", **words) for head in range(3)]
    lost = AgentHealth(step=1, dropped={f"why-{at}-{i}": 2**53 for i in range(100)})
    return {}, rank.batch(rank.started(), rank.sample(1), *verdicts, lost).model_dump_json().encode()


def forged_starts_and_switches(at: int) -> AttackRequest:
    """A new boot of arbitrary age each time, with ever more layers and unknown modes."""
    rank = FakeRank(run=f"m/wide-{at % 7}", boot=f"b{at}")
    layers = [Layer(layer=at * 50 + n, name="x", heads=(n,), kv_heads=1, head_dim=1, served_by="x") for n in range(50)]
    rank.layers, rank.count = tuple(layers), 50
    heads = tuple((layer.layer, layer.heads[0]) for layer in layers)
    names = (f"mode_{at}",) * len(heads)
    switched = Switched(id=f"s{at}", step=1, outcome="applied", heads=heads, before=names, after=names, reason="x")
    aged = {AGE_HEADER: ("0", "1e8", "-1", "nan", "9" * 300)[at % 5], REPLAYED_HEADER: ("true", "false")[at % 2]}
    return aged, rank.batch(rank.started(), rank.sample(2**36 + at), switched).model_dump_json().encode()


def runs_of_others(at: int) -> AttackRequest:
    rank = FakeRank(run="a/job", boot=f"z{at}")
    return {}, rank.batch(rank.started(), rank.sample(2**36)).model_dump_json().encode()


@dataclass
class Attack:
    """All attacks at once, from another address, until they are cancelled."""

    url: str
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    begun: dict[str, asyncio.Event] = field(default_factory=dict)

    def all(self) -> Iterator[Coroutine[Any, Any, None]]:
        for make in (flood, nonsense, huge, many_runs_with_warnings, forged_starts_and_switches, runs_of_others):
            yield self._send_forever(make)
        yield self._hold("missing bodies", b"POST /v1/batches HTTP/1.1\r\n", b"content-length: 8000000\r\n\r\n{")
        yield self._hold("missing login bodies", b"POST /v1/login HTTP/1.1\r\n", b"")
        yield self._hold("unfinished headers", b"GET /healthz HTTP/1.1\r\n", b"x-slow: ")

    def _begin(self, name: str) -> Counter[int]:
        self.begun[name] = asyncio.Event()
        return self.statuses.setdefault(name, Counter())

    async def _send_forever(self, make: Callable[[int], AttackRequest]) -> None:
        statuses = self._begin(make.__name__)
        transport = httpx.AsyncHTTPTransport(local_address=ATTACKER_ADDRESS)
        async with httpx.AsyncClient(
            base_url=self.url, headers=bearer(MALLORY), transport=transport, timeout=60
        ) as client:
            for at in count():
                headers, body = make(at)
                try:
                    statuses[(await client.post("/v1/batches", content=body, headers=headers)).status_code] += 1
                except httpx.TransportError:  # the service may close the connection
                    statuses[0] += 1
                self.begun[make.__name__].set()

    async def _hold(self, name: str, first: bytes, last: bytes) -> None:
        """Hold connections with unfinished requests, and reopen them when they are closed."""
        statuses, address = self._begin(name), urlsplit(self.url)
        head = first + b"host: x\r\ncontent-type: application/json\r\n"
        head += b"authorization: Bearer " + MALLORY.encode() + b"\r\n" if b"batches" in first else b""
        head += last or b"transfer-encoding: chunked\r\n\r\n1\r\n"

        async def hold() -> None:
            while True:
                reader, writer = await asyncio.open_connection(
                    address.hostname, address.port, local_addr=(ATTACKER_ADDRESS, 0)
                )
                try:
                    writer.write(head)
                    statuses[1] += 1
                    if statuses[1] == CONNECTIONS:
                        self.begun[name].set()
                    await reader.read()
                except OSError:
                    pass
                finally:
                    writer.transport.abort()
                await asyncio.sleep(1.0)

        await asyncio.gather(*(hold() for _ in range(CONNECTIONS)))


@asynccontextmanager
async def running(attack: Attack) -> AsyncIterator[None]:
    """Run all parts of the attack during the `with` block."""
    tasks = [asyncio.create_task(part) for part in attack.all()]
    try:
        await asyncio.sleep(0)
        begun = asyncio.gather(*(each.wait() for each in attack.begun.values()))
        parts: list[asyncio.Future[Any]] = [begun, *tasks]
        await asyncio.wait(parts, timeout=240, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        yield
        still_running = [not task.done() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error for error in ended if not isinstance(error, asyncio.CancelledError)] == []
    assert all(still_running)
    assert all(each.is_set() for each in attack.begun.values()), attack.statuses


# Requests of the other clients, and the responses to them.

VOLATILE: Final = re.compile(
    r'"(\w*seconds|last_seen|first_seen|sequence|hash|command|commands)":("[^"]*"|[^,}\]]+|\[[^\]]*\])'
)
"""Times and random values in JSON."""


def without_volatile(text: str) -> str:
    """A response without values that differ between two executions of the scenario."""
    return VOLATILE.sub(r'"\1":0', text)


def series_of_ann(metrics: str) -> str:
    """The series of Ann's runs in /metrics."""
    own = [line for line in metrics.splitlines() if 'run="a/' in line]
    return "\n".join(line for line in own if "timestamp" not in line)


async def first_event(client: httpx.AsyncClient, kind: str, joined: asyncio.Event) -> str:
    """The data of the first event of this kind in the stream of Ann's run."""
    async with client.stream("GET", "/v1/stream", params={"run": "a/job"}, headers=bearer(READER)) as stream:
        joined.set()
        assert stream.status_code == 200
        found = False
        async for line in stream.aiter_lines():
            if found and line.startswith("data:"):
                return without_volatile(line)
            found = found or line == f"event: {kind}"
    return "the stream ended"


async def responses_to_others(url: str, rounds: int) -> list[tuple[str, int, str]]:
    """The responses to an agent, a reader, a scraper, a stream client, Alertmanager, probes and a browser."""
    ann, responses = FakeRank(run="a/job"), []
    alert = {"status": "firing", "labels": {"alertname": "Other", "run": "a/job"}, "startsAt": "s", "fingerprint": "f"}
    hook = json.dumps({"version": "4", "status": "firing", "alerts": [alert]})
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

        async def ask(path: str, secret: str | None = READER, body: str | None = None) -> None:
            headers = bearer(secret) if secret else {}
            method = "GET" if body is None else "POST"
            response = await client.request(method, path, content=body, headers=headers)
            text = series_of_ann(response.text) if path == "/metrics" else without_volatile(response.text)
            responses.append((path, response.status_code, text))

        for at in range(rounds):
            step, joined = 2 * at + 1, asyncio.Event()
            listener = asyncio.create_task(first_event(client, "verdict", joined))
            await joined.wait()
            first = [ann.started()] if at == 0 else []
            await ask("/v1/batches", ANN, ann.batch(*first, ann.sample(step)).model_dump_json())
            warned = ann.verdict(step + 1, name=f"w-{at}", severity="critical")
            await ask("/v1/batches", ANN, ann.batch(ann.sample(step + 1), warned).model_dump_json())
            responses.append(("stream", 200, await listener))
            await ask("/metrics")
            await ask("/v1/runs?search=a/")
            for part in ("", "/curves?line=head.score_max", "/matrix?metric=head.score_max", "/events", "/incidents"):
                await ask(f"/v1/runs/a/job{part}")
            await ask("/v1/webhooks/alertmanager", HOOK, hook)
            for path in ("/healthz", "/readyz", "/", "/v1/session"):
                await ask(path, None)
    return responses


@pytest.mark.full
@pytest.mark.promise("S4")
@pytest.mark.promise("S12")
def test_attack_with_ingest_token_changes_no_response_of_other_clients(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    rounds = sizes("hostile_rounds", quick=1, long=40)

    async def scenario(url: str) -> tuple[list[tuple[str, int, str]], Attack]:
        attack = Attack(url)
        async with running(attack):
            return await responses_to_others(url, rounds), attack

    (tmp_path / "calm").mkdir()
    with LiveService(tmp_path / "calm", SETTINGS, **SMALL) as service:
        calm = asyncio.run(responses_to_others(service.url, rounds))
    with LiveService(tmp_path, SETTINGS, **SMALL) as service:
        attacked, attack = asyncio.run(scenario(service.url))
    record_property("requests of other clients", len(attacked))
    record_property("requests of the attack", sum(counts.total() for counts in attack.statuses.values()))
    assert {status for _, status, _ in calm} == {200}
    for expected, found in zip(calm, attacked, strict=True):
        assert found == expected
    stored = {"flood", "many_runs_with_warnings", "forged_starts_and_switches"}
    assert all(attack.statuses[name][200] for name in stored), attack.statuses
    assert not any(attack.statuses[name][200] for name in attack.statuses.keys() - stored), attack.statuses
    assert not any(counts[500] for counts in attack.statuses.values()), attack.statuses
