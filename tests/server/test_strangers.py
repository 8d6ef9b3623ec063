"""What who has no token can make the service do, and log."""

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from foreshock.server.logs import Seldom, lines
from foreshock.server.testing import FakeRank

SECRET = "a-secret-of-sixteen-or-more"


@pytest.mark.promise("S19")
@pytest.mark.settings(token=SECRET)
async def test_no_address_but_the_login_reads_a_strangers_body(service: Any) -> None:
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
        answer = await service.client.post(path, content=body(), headers=headers)
        assert answer.status_code in (401, 404, 405), path
        assert not read, path


@pytest.mark.promise("S5")
@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.settings(token=SECRET)
async def test_no_more_than_64_kib_of_a_strangers_body_is_read(service: Any, with_length: bool) -> None:
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 4096
            yield b" " * 4096

    headers = {"content-type": "application/json", **({"content-length": str(4096 * 1000)} if with_length else {})}
    answer = await service.client.post("/v1/login", content=pieces(), headers=headers)
    assert answer.status_code == 413
    assert "64 KiB" in answer.json()["detail"]
    assert taken <= 65_536 + 2 * 4096


async def attempt(service: Any, address: str, secret: str) -> httpx.Response:
    """Log in from an address."""
    body, headers = {"token": secret}, {"x-forwarded-for": address}
    answer: httpx.Response = await service.client.post("/v1/login", json=body, headers=headers)
    return answer


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET, trusted_proxies=("127.0.0.1",))
async def test_guesses_of_one_address_are_limited_and_others_still_log_in(service: Any) -> None:
    answers = [await attempt(service, "203.0.113.9", f"guess-{number}") for number in range(40)]
    assert [answer.status_code for answer in answers[:5]] == [401] * 5
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 25
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert (await attempt(service, "203.0.113.9", SECRET)).status_code == 429  # a right one is not tried either
    assert (await attempt(service, "203.0.113.10", SECRET)).status_code == 200


@pytest.mark.promise("S7")
@pytest.mark.settings(token=SECRET, trusted_proxies=("127.0.0.1",))
async def test_a_flood_of_guesses_locks_out_nobody_elsewhere_and_does_not_fill_the_log(service: Any) -> None:
    """The guesses come from many addresses, and from many of the one IPv6 network that a single host has."""

    async def status(address: str, secret: str) -> int:
        return (await attempt(service, address, secret)).status_code

    with capture_logs() as logged:
        one_host = [await status(f"2001:db8:1:2:{number:x}::1", "guess") for number in range(40)]
        flood = [await status(f"198.51.{number // 250}.{number % 250}", "guess") for number in range(600)]
        people = [f"203.0.113.{number}" for number in range(100)] + ["2001:db8:1:3::1", "::ffff:203.0.113.200"]
        answers = [await status(address, SECRET) for address in people]
    assert 10 <= one_host.count(401) <= 15
    assert set(flood) == {401}
    assert answers == [200] * 102
    assert 1 < len(logged) < 200


@pytest.mark.promise("S7")
def test_refused_secrets_are_counted_and_the_log_names_where_they_came_from(play: Any) -> None:
    async def story(service: Any) -> None:
        async def ask(method: str, path: str, address: str, **more: Any) -> int:
            headers = {"x-forwarded-for": address} | more.pop("headers", {})
            return int((await service.client.request(method, path, headers=headers, **more)).status_code)

        wrong = {"authorization": "Bearer a-guess-that-nobody-may-see"}
        json_type = {"content-type": "application/json"}
        assert await ask("POST", "/v1/login", "198.51.100.5", json={"token": SECRET}) == 200
        service.client.cookies.clear()
        for _ in range(30):
            await ask("POST", "/v1/login", "198.51.100.1", json={"token": "a-guess-that-nobody-may-see"})
            assert await ask("GET", "/v1/runs", "198.51.100.2", headers=wrong) == 401
            assert await ask("POST", "/v1/batches", "198.51.100.3", headers=wrong | json_type, content=b"{}") == 401
            assert await ask("GET", "/v1/runs", "198.51.100.4") == 401  # who shows no secret guesses none
        text = (await service.client.get("/metrics", headers={"authorization": f"Bearer {SECRET}"})).text
        counted = dict(re.findall(r'foreshock_service_refusals_total\{what="(.*)"\} (\S+)', text))
        assert float(counted["login"]) >= 10
        assert float(counted["login"]) + float(counted["throttled login"]) == 30
        assert float(counted["token"]) == 60

    with capture_logs() as logged:
        play(story, token=SECRET, trusted_proxies=("127.0.0.1",))
    for number, logged_lines in ((1, 2), (2, 1), (3, 1), (4, 0), (5, 0)):
        assert [entry.get("client") for entry in logged].count(f"from 198.51.100.{number}") == logged_lines
    assert "nobody-may-see" not in str(logged)


@pytest.mark.promise("S20")
@pytest.mark.parametrize("path", ["/v1/runs/a%00b", "/v1/commands/a%00b", "/v1/runs?cursor=%00"])
async def test_a_nul_in_an_address_is_refused(service: Any, path: str) -> None:
    answer = await service.client.get(path)
    assert (answer.status_code, "NUL" in answer.text) == (422, True)


ALERT = {"status": "firing", "labels": {"alertname": "a", "run": "run-1"}, "startsAt": "now", "fingerprint": "f"}
ORDER = {"who": "ann", "reason": "r", "mode": "exact_delta", "expect": "plain"}
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/login": {"token": "t"},
    "/v1/runs/run-1": {"who": "ann", "display_name": "d", "notes": "n", "tags": ["t"]},
    "/v1/runs/run-1/commands": ORDER,
    "/v1/runs/run-1/acknowledge": {"who": "ann", "reason": "r", "incident": "rounding"},
    **{f"/v1/commands/c/{act}": {"who": "ann", "reason": "r"} for act in ("approve", "reject", "cancel", "undo")},
    "/v1/webhooks/alertmanager": {"version": "4", "status": "firing", "alerts": [ALERT]},
}
HALF, NUL = "a\ud800", "a\x00"


def with_one(odd: str, value: Any) -> Iterator[Any]:
    """The same with `odd` in the place of one text."""
    if isinstance(value, str):
        yield odd
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in with_one(odd, inner))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in with_one(odd, inner))


@pytest.mark.promise("S20")
@pytest.mark.parametrize(("odd", "word"), [(HALF, "surrogate"), (NUL, "NUL")])
async def test_what_no_store_can_hold_is_refused_in_every_text_that_is_sent(service: Any, odd: str, word: str) -> None:
    posts = {path for path, item in service.app.openapi()["paths"].items() if {"post", "patch"} & item.keys()}
    known = {path.replace("/run-1", "/{run}").replace("/c/", "/{command}/") for path in TEXTS}
    assert posts - known == {"/v1/batches", "/v1/logout", "/v1/commands/{command}/{how}"}
    rank = FakeRank()
    await service.store(rank, rank.started())
    sent = [(path, body) for path, whole in TEXTS.items() for body in (*with_one(odd, whole), {**whole, odd: 1})]
    batch = json.loads(rank.batch(rank.started(), rank.verdict(1)).model_dump_json())
    sent += [("/v1/batches", body) for body in with_one(HALF, batch)]  # a NUL in what agents say is replaced
    headers = {"content-type": "application/json"}
    for path, body in sent:
        method = "PATCH" if path == "/v1/runs/run-1" else "POST"
        answer = await service.client.request(method, path, content=json.dumps(body), headers=headers)
        ignored = odd in body and path == "/v1/webhooks/alertmanager"  # fields that we do not know
        alone = "alerts" in body and body["alerts"] != [ALERT]  # an alert is refused without its delivery
        assert answer.status_code == (200 if ignored or alone else 422), (path, body, answer.text)
        if alone:
            [result] = answer.json()["results"]
            assert result.startswith("refused: "), (body, result)
            assert word in result


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, message, None, None)


async def test_a_message_is_logged_once_in_ten_seconds_and_the_metrics_count_those_left_out(service: Any) -> None:
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
