"""Limits for tokens, unauthenticated clients and idle connections."""

import json
import logging
import re
import resource
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from structlog.testing import capture_logs

from foreshock.server import limits
from foreshock.server.limits import Buckets, ConcurrencyLimit, length_of, retry_after
from foreshock.server.logs import Seldom, lines
from foreshock.server.problems import ProblemError
from foreshock.server.testing import FakeRank, LiveService, post

EIGHTHS = st.integers(0, 80).map(lambda n: n / 8)
"""Multiples of 1/8, which floating point adds exactly."""


@given(rate=st.sampled_from([0.5, 1.0, 4.0]), burst=st.integers(1, 6), pauses=st.lists(EIGHTHS, max_size=40))
def test_bucket_never_grants_more_than_burst_plus_refill(rate: float, burst: int, pauses: Sequence[float]) -> None:
    buckets, now, taken = Buckets(rate, burst), 0.0, []
    for pause in pauses:
        now += pause
        if buckets.take("a", now) == 0:
            taken.append(now)
    for first, begun in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - begun)


@given(rate=st.sampled_from([0.5, 1.0, 4.0]), burst=st.integers(1, 6), pauses=st.lists(EIGHTHS, max_size=40))
def test_bucket_grants_after_the_returned_wait_and_not_before(rate: float, burst: int, pauses: Sequence[float]) -> None:
    buckets, now = Buckets(rate, burst), 0.0
    for pause in pauses:
        now += pause
        if wait := buckets.take("a", now):
            assert buckets.take("a", now + wait / 2) > 0
            assert buckets.take("a", now + wait) == 0
            now += wait


def test_callers_have_separate_buckets_and_the_oldest_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_BUCKETS", 3)
    buckets = Buckets(1.0, 1)
    assert [buckets.take(who, 0.0) for who in "abab"] == [0, 0, 1, 1]
    assert [buckets.take(who, 0.0) for who in "cdba"] == [0, 0, 1, 0]


@given(seconds=st.floats(0, 1000))
def test_retry_after_is_between_requested_and_twice_the_time(seconds: float) -> None:
    announced = int(retry_after(seconds)["retry-after"])
    assert max(1, seconds) <= announced <= max(1, 2 * seconds + 1)


@pytest.mark.parametrize(
    ("value", "length"),
    [("0", 0), ("12", 12), ("", 0), ("-5", 0), ("1e3", 0), ("\u00b2", 0), ("9" * 15, 10**15 - 1), ("9" * 16, 0)],
)
def test_content_length_is_parsed_only_if_it_is_a_plain_number(value: str, length: int) -> None:
    assert length_of(Headers({"content-length": value})) == length


def body(size: int) -> Headers:
    return Headers({"content-length": str(size)})


@pytest.mark.promise("S19")
def test_body_without_length_counts_as_maximum_size() -> None:
    shares = ConcurrencyLimit(24, body_bytes=100, max_bytes=80)
    with shares.take("a", Headers({"transfer-encoding": "chunked"}), known=True):
        with shares.take("a", body(20), known=True):
            pass
        with pytest.raises(ProblemError), shares.take("a", body(21), known=True):
            pass


@pytest.mark.promise("S19")
@given(
    callers=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 120), st.booleans()), max_size=30),
    requests=st.integers(1, 24),
    byte_limit=st.sampled_from([50, 100]),
)
def test_concurrency_limit_matches_reference_and_releases_every_share(
    callers: list[tuple[str, int, bool]], requests: int, byte_limit: int
) -> None:
    shares = ConcurrencyLimit(requests, body_bytes=byte_limit, max_bytes=80)
    with ExitStack() as requests_open:
        active: dict[str, list[int]] = {}
        for who, size, known in callers:
            sizes, counted = active.setdefault(who if known else "strangers", []), min(size, 80)
            full = len(sizes) >= max(1, requests // (2 if known else 4))
            fits = not full and not (counted and sum(sizes) and sum(sizes) + counted > byte_limit)
            try:
                requests_open.enter_context(shares.take(who, body(size), known=known))
                sizes.append(counted)
                refused = None
            except ProblemError as error:
                refused = error.status_code
            assert refused == (None if fits else 429)
    for known in (True, False):
        with shares.take("a", body(120), known=known):
            pass


SECRET = "a-secret-of-sixteen-or-more"
SILENT = {
    "no bytes": b"",
    "unfinished header": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "empty lines": b"\r\n\r\n",
    "missing body": (
        b"POST /v1/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    ),
}
WITH_TOKEN = {"FORESHOCK_TOKEN": SECRET}
SHORT_DEADLINE = {"request_seconds": 3.0}


def connected(service: LiveService) -> socket.socket:
    address = urlsplit(service.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=30)


def ended(connection: socket.socket) -> bool:
    """Whether the service closes the connection, possibly after a response."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.full
@pytest.mark.promise("S19")
@pytest.mark.parametrize("packet", [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20, b"nothing that is HTTP\r\n\r\n"])
def test_unauthenticated_packets_write_little_to_the_log(tmp_path: Path, packet: bytes) -> None:
    with LiveService(tmp_path, {"FORESHOCK_TOKEN": SECRET}) as service:
        before = (tmp_path / "service.log").stat().st_size
        for _ in range(100):
            with connected(service) as connection, suppress(ConnectionError):
                connection.sendall(packet)
                connection.recv(10)
        with service.client() as client:
            assert client.get("/healthz").status_code == 200
        written = (tmp_path / "service.log").read_text()[before:]
    assert "Traceback" not in written
    assert len(written) < 2000


@pytest.mark.promise("S4")
def test_deadline_applies_to_each_request_and_not_to_the_connection(tmp_path: Path) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + SECRET.encode() + b"\r\n\r\n"
    with LiveService(tmp_path, WITH_TOKEN, **SHORT_DEADLINE) as service, ExitStack() as opened:
        connections = [opened.enter_context(connected(service)) for _ in SILENT]
        for connection, sent in zip(connections, SILENT.values(), strict=True):
            connection.sendall(sent)
        last = opened.enter_context(connected(service))
        for _ in range(4):
            last.sendall(request)
            answered = b""
            while not answered.endswith(b"}"):
                answered += last.recv(65_536)
            assert answered.startswith(b"HTTP/1.1 200")
            time.sleep(1.0)  # all requests together take longer than the deadline
        last.sendall(SILENT["unfinished header"])
        assert all(map(ended, [*connections, last]))


@pytest.mark.promise("S4")
def test_many_silent_connections_do_not_block_health_checks_and_ingest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, 4096))
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=few))
    with LiveService(tmp_path, WITH_TOKEN, request_seconds=600.0) as service, ExitStack() as opened:
        for number in range(400):
            opened.enter_context(connected(service)).sendall(list(SILENT.values())[number % 3])
        rank = FakeRank()
        with service.client(SECRET) as client:
            assert client.get("/readyz").status_code == 200
            for step in range(5):
                assert client.get("/healthz").status_code == 200
                assert post(client, rank.batch(rank.started(), rank.sample(step + 1))).status_code == 200


@pytest.mark.promise("S5")
def test_endless_headers_are_refused_before_they_fill_memory(tmp_path: Path) -> None:
    with LiveService(tmp_path, WITH_TOKEN, **SHORT_DEADLINE) as service, connected(service) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        sent, began = 0, time.monotonic()
        try:
            while time.monotonic() - began < 20 and sent < 32 * 2**20:
                line = b"X-A: " + b"a" * 8000 + b"\r\n"
                connection.sendall(line)
                sent += len(line)
        except ConnectionError:
            pass
        assert sent < 8 * 2**20
        assert ended(connection)


@pytest.mark.promise("S19")
@pytest.mark.settings(token=SECRET)
async def test_only_login_reads_body_of_unauthenticated_request(service: Any) -> None:
    read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield b"{"

    found = service.app.openapi()["paths"]
    posts = [path for path, item in found.items() if "post" in item and path != "/v1/login"]
    assert {"/v1/batches", "/v1/webhooks/alertmanager"} <= set(posts)
    for path in (*posts, "/", "/healthz", "/v1/session", "/assets/x", "/nowhere"):
        headers = {"content-type": "application/json", "content-length": "60000", "authorization": "Bearer wrong"}
        response = await service.client.post(path, content=body(), headers=headers)
        assert response.status_code in (401, 404, 405), path
        assert not read, path


@pytest.mark.promise("S5")
@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.settings(token=SECRET)
async def test_at_most_64_kib_of_unauthenticated_body_is_read(service: Any, with_length: bool) -> None:
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 4096
            yield b" " * 4096

    headers = {"content-type": "application/json", **({"content-length": str(4096 * 1000)} if with_length else {})}
    response = await service.client.post("/v1/login", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert "64 KiB" in response.json()["detail"]
    assert taken <= 65_536 + 2 * 4096


async def attempt(service: Any, address: str, secret: str) -> httpx.Response:
    """Try to log in from an address."""
    body, headers = {"token": secret}, {"x-forwarded-for": address}
    response: httpx.Response = await service.client.post("/v1/login", json=body, headers=headers)
    return response


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET, trusted_proxies=("127.0.0.1",))
async def test_login_attempts_are_limited_per_address(service: Any) -> None:
    responses = [await attempt(service, "203.0.113.9", f"guess-{number}") for number in range(40)]
    assert [response.status_code for response in responses[:5]] == [401] * 5
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) >= 25
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert (await attempt(service, "203.0.113.9", SECRET)).status_code == 429  # even the correct token is refused
    assert (await attempt(service, "203.0.113.10", SECRET)).status_code == 200


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET, trusted_proxies=("127.0.0.1",))
async def test_distributed_guessing_locks_out_nobody_and_does_not_flood_the_log(service: Any) -> None:
    """The guesses come from many IPv4 addresses and from the IPv6 network of one host."""

    async def status(address: str, secret: str) -> int:
        return (await attempt(service, address, secret)).status_code

    with capture_logs() as logged:
        one_host = [await status(f"2001:db8:1:2:{number:x}::1", "guess") for number in range(40)]
        flood = [await status(f"198.51.{number // 250}.{number % 250}", "guess") for number in range(600)]
        people = [f"203.0.113.{number}" for number in range(100)] + ["2001:db8:1:3::1", "::ffff:203.0.113.200"]
        responses = [await status(address, SECRET) for address in people]
    assert 10 <= one_host.count(401) <= 15
    assert set(flood) == {401}
    assert responses == [200] * 102
    assert 1 < len(logged) < 200


@pytest.mark.promise("S7")
def test_refused_credentials_are_counted_and_logged_with_address(run_scenario: Any) -> None:
    async def scenario(service: Any) -> None:
        async def ask(method: str, path: str, address: str, **more: Any) -> int:
            headers = {"x-forwarded-for": address} | more.pop("headers", {})
            return int((await service.client.request(method, path, headers=headers, **more)).status_code)

        wrong = {"authorization": "Bearer a-guess-that-must-not-be-logged"}
        json_type = {"content-type": "application/json"}
        assert await ask("POST", "/v1/login", "198.51.100.5", json={"token": SECRET}) == 200
        service.client.cookies.clear()
        for _ in range(30):
            await ask("POST", "/v1/login", "198.51.100.1", json={"token": "a-guess-that-must-not-be-logged"})
            assert await ask("GET", "/v1/runs", "198.51.100.2", headers=wrong) == 401
            assert await ask("POST", "/v1/batches", "198.51.100.3", headers=wrong | json_type, content=b"{}") == 401
            assert await ask("GET", "/v1/runs", "198.51.100.4") == 401  # a request without a secret is not a guess
        text = (await service.client.get("/metrics", headers={"authorization": f"Bearer {SECRET}"})).text
        counted = dict(re.findall(r'foreshock_service_refusals_total\{what="(.*)"\} (\S+)', text))
        assert float(counted["login"]) >= 10
        assert float(counted["login"]) + float(counted["throttled login"]) == 30
        assert float(counted["token"]) == 60

    with capture_logs() as logged:
        run_scenario(scenario, token=SECRET, trusted_proxies=("127.0.0.1",))
    for number, logged_lines in ((1, 2), (2, 1), (3, 1), (4, 0), (5, 0)):
        assert [entry.get("client") for entry in logged].count(f"from 198.51.100.{number}") == logged_lines
    assert "must-not-be-logged" not in str(logged)


@pytest.mark.promise("S20")
@pytest.mark.parametrize("path", ["/v1/runs/a%00b", "/v1/commands/a%00b", "/v1/runs?cursor=%00"])
async def test_nul_in_url_is_refused(service: Any, path: str) -> None:
    response = await service.client.get(path)
    assert (response.status_code, "NUL" in response.text) == (422, True)


ALERT = {"status": "firing", "labels": {"alertname": "a", "run": "run-1"}, "startsAt": "now", "fingerprint": "f"}
A_SWITCH = {"who": "ann", "reason": "r", "mode": "exact_delta", "expect": "plain"}
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/login": {"token": "t"},
    "/v1/runs/run-1": {"who": "ann", "display_name": "d", "notes": "n", "tags": ["t"]},
    "/v1/runs/run-1/commands": A_SWITCH,
    "/v1/runs/run-1/acknowledge": {"who": "ann", "reason": "r", "incident": "rounding"},
    **{f"/v1/commands/c/{act}": {"who": "ann", "reason": "r"} for act in ("approve", "reject", "cancel", "undo")},
    "/v1/webhooks/alertmanager": {"version": "4", "status": "firing", "alerts": [ALERT]},
}
SURROGATE, NUL = "a\ud800", "a\x00"


def with_one_replaced(invalid: str, value: Any) -> Iterator[Any]:
    """The same value with one text replaced by `invalid`, for each text."""
    if isinstance(value, str):
        yield invalid
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in with_one_replaced(invalid, inner))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in with_one_replaced(invalid, inner))


@pytest.mark.promise("S20")
@pytest.mark.parametrize(("invalid", "word"), [(SURROGATE, "surrogate"), (NUL, "NUL")])
async def test_unstorable_text_is_refused_in_every_field(service: Any, rank: FakeRank, invalid: str, word: str) -> None:
    posts = {path for path, item in service.app.openapi()["paths"].items() if {"post", "patch"} & item.keys()}
    known = {path.replace("/run-1", "/{run}").replace("/c/", "/{command}/") for path in TEXTS}
    assert posts - known == {"/v1/batches", "/v1/logout", "/v1/commands/{command}/{how}"}
    await service.store(rank, rank.started())
    sent = [
        (path, body)
        for path, whole in TEXTS.items()
        for body in (*with_one_replaced(invalid, whole), {**whole, invalid: 1})
    ]
    batch = json.loads(rank.batch(rank.started(), rank.verdict(1)).model_dump_json())
    sent += [("/v1/batches", body) for body in with_one_replaced(SURROGATE, batch)]  # a NUL in a batch is replaced
    headers = {"content-type": "application/json"}
    for path, body in sent:
        method = "PATCH" if path == "/v1/runs/run-1" else "POST"
        response = await service.client.request(method, path, content=json.dumps(body), headers=headers)
        ignored = invalid in body and path == "/v1/webhooks/alertmanager"  # unknown fields are ignored
        alert_refused = "alerts" in body and body["alerts"] != [
            ALERT
        ]  # an alert is refused but its delivery is accepted
        assert response.status_code == (200 if ignored or alert_refused else 422), (path, body, response.text)
        if alert_refused:
            [result] = response.json()["results"]
            assert result.startswith("refused: "), (body, result)
            assert word in result


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, message, None, None)


async def test_repeated_log_message_is_suppressed_and_counted_in_metrics(service: Any) -> None:
    now, before = 0.0, lines["left out"]
    seldom = Seldom(lambda: now)
    assert [seldom.filter(record("bad")) for _ in range(5)] == [True, False, False, False, False]
    assert seldom.filter(record("worse"))
    now = 10.0
    again = record("bad")
    assert seldom.filter(again)
    assert again.getMessage() == "bad (4 more of these were left out)"
    metrics = (await service.client.get("/metrics")).text
    assert f"\nforeshock_service_log_lines_dropped_total {before + 4}.0\n" in metrics
