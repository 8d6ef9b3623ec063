"""The ingest endpoint: limits, refusals with reasons, and names that never become paths."""

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from foreshock.contract.wire import MAX_VALUES
from foreshock.server.testing import FakeRank, LiveService


@pytest.mark.promise("S3")
@pytest.mark.parametrize("bad", [range(1), range(1, 2), range(14, 15), range(1, 15)])
async def test_bad_event_refuses_whole_batch_and_first_ten_are_named(service: Any, rank: FakeRank, bad: range) -> None:
    body = json.loads(rank.batch(rank.started(), *(rank.sample(s) for s in range(1, 15))).model_dump_json())
    for position in bad:
        body["events"][position]["step"] = -1
    response = await service.client.post("/v1/batches", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    named = [error["where"].rpartition(".")[0] for error in response.json()["errors"]]
    assert [where.split(".")[:2] for where in named] == [["events", str(position)] for position in bad[:10]]
    assert (await service.get("/v1/runs"))["runs"] == []


HOSTILE = {
    "nothing": b"",
    "not JSON": b"\x80abc",
    "nested too deeply": b"[" * 100_000,
    "a number too large": b'{"wire":1,"run":"r","rank":1e400,"boot":"b","sequence":1,"events":[]}',
    "NaN literal": b'{"wire":1,"run":"r","rank":NaN,"boot":"b","sequence":1,"events":[]}',
    "a lone surrogate": b'{"wire":1,"run":"\\ud800","rank":0,"boot":"b","sequence":1,"events":[]}',
    "another wire version": b'{"wire":2,"run":"r","rank":0,"boot":"b","sequence":1,"events":[]}',
    "markup as a name": b'{"wire":1,"run":"<img onerror=x>","rank":0,"boot":"b","sequence":1,"events":[]}',
    "a path as a name": b'{"wire":1,"run":"..\\\\..","rank":0,"boot":"b","sequence":1,"events":[]}',
    "no events": b'{"wire":1,"run":"r","rank":0,"boot":"b","sequence":1,"events":[]}',
    "a list": b"[]",
}


@pytest.mark.promise("S5")
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_body_is_refused_with_problem_response(service: Any, body: bytes) -> None:
    response = await service.client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (415, 422)
    assert response.json()["status"] == response.status_code


@pytest.mark.promise("S5")
@pytest.mark.settings(max_body_bytes=4096)
async def test_oversized_compressed_or_non_json_body_is_refused(service: Any) -> None:
    async def drip() -> Any:
        for _ in range(100):
            yield b" " * 100

    def post(**kind: Any) -> Any:
        return service.client.post("/v1/batches", **kind)

    json_type = {"content-type": "application/json"}
    large = await post(content=b" " * 5000, headers=json_type)
    chunked = await post(content=drip(), headers=json_type)
    assert [large.status_code, chunked.status_code] == [413, 413]
    assert large.headers["content-type"] == chunked.headers["content-type"] == "application/problem+json"
    compressed = await post(content=b"{}", headers={**json_type, "content-encoding": "gzip"})
    plain = await post(content=b"{}", headers={"content-type": "text/plain"})
    assert [compressed.status_code, plain.status_code] == [415, 415]


@pytest.mark.promise("S12")
@pytest.mark.settings(run_batches_per_second=0.5)
async def test_noisy_run_is_throttled_but_quiet_run_is_not(service: Any) -> None:
    noisy, quiet = FakeRank(run="noisy"), FakeRank(run="quiet")
    codes = [(await service.post(noisy.batch(noisy.sample(step)))).status_code for step in range(1, 30)]
    assert codes[0] == 200
    assert 429 in codes
    assert (await service.post(quiet.batch(quiet.sample(1)))).status_code == 200


async def test_run_name_that_no_url_can_address_is_refused(service: Any) -> None:
    """Clients, including browsers, normalise path segments that consist of dots before they send a request."""
    suffixes = {
        path.rpartition("/")[2] for path in service.app.openapi()["paths"] if path.startswith("/v1/runs/{run}/")
    }
    assert "commands" in suffixes
    reserved = {f"team/{word}": f"may not end in /{word}" for word in suffixes}
    dots = dict.fromkeys(
        (".", "..", "team-a/../team-b/run", "./run", "team-a/.."), "has a part of one or two dots only"
    )
    for name, sentence in (reserved | dots).items():
        response = await service.post(FakeRank(run=name).batch(FakeRank().started()))
        assert (response.status_code, sentence in response.json()["detail"]) == (422, True), name


@pytest.mark.promise("S13")
async def test_control_characters_in_sentences_are_replaced(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(), rank.verdict(1, sentence="a\nb\x00c\u202ed <img onerror=x>"))
    newest = (await service.get("/v1/runs/run-1/events", kind="verdict"))["events"][0]
    assert newest["sentence"] == "a\ufffdb\ufffdc\ufffdd <img onerror=x>"


@pytest.mark.promise("S13")
async def test_repeated_refusals_are_logged_once_with_reason(service: Any, monkeypatch: Any) -> None:
    logged: list[Any] = []
    monkeypatch.setattr("foreshock.server.endpoint.log.warning", lambda *args, **fields: logged.append((args, fields)))

    body = json.loads(FakeRank().batch(FakeRank().sample(1)).model_dump_json()) | {"run": "a\nb<img>"}
    for _ in range(50):
        assert (await service.client.post("/v1/batches", json=body)).status_code == 422
    assert service.app.state.counters.batches["refused"] == 50

    [(_, fields)] = logged
    assert "run: " in fields["why"]
    assert "is not an identifier" in fields["why"]
    assert "\n" not in fields["why"]


MANY = 2 * MAX_VALUES
BATCH_START = b'{"run":"r","rank":0,"boot":"b","sequence":1,"events":['
SWITCHED = (
    b'{"kind":"switched","id":"a","step":1,"outcome":"applied","reason":"","after":[],"heads":[%b],"before":[%b]}'
)
HEALTH = b'{"kind":"health","step":1,"dropped":{%b}}'


def listed(value: bytes, times: int = MANY) -> bytes:
    return b",".join([value] * times)


BOMBS = {
    "invalid modes": SWITCHED % (b"", listed(b'""')),
    "a few invalid modes in each of many events": listed(SWITCHED % (b"", listed(b'""', 1900)), 500),
    "invalid heads": SWITCHED % (listed(b"[0,-1]", MAX_VALUES // 4), b""),
    "invalid reasons": HEALTH % b",".join(b'"?%x":1' % i for i in range(MAX_VALUES // 3)),
    "a few invalid reasons in each of many events": listed(HEALTH % b",".join(b'"?%x":1' % i for i in range(250)), 500),
    "unknown fields": b'{"kind":"finished","x":[' + listed(b'{"a":{}}') + b"]}",
    "events of unknown kind": listed(b'{"kind":"new","x":[%b]}' % listed(b"[]", 4000), 500),
}


def peak_bytes(pid: int) -> int:
    """The peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.mark.full
@pytest.mark.promise("S5")
def test_small_body_never_takes_much_memory(tmp_path: Path) -> None:
    with LiveService(tmp_path) as service, service.client() as client:
        for name, events in BOMBS.items():
            body = BATCH_START + events + b"]}"
            before = peak_bytes(service.pid)
            response = client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
            assert response.status_code == 422, name
            assert "values" in response.json()["detail"] or "error" in response.json()["detail"]
            assert peak_bytes(service.pid) - before < 20 * len(body) + 128 * 2**20, name


TRAVERSALS = [
    "/assets/../index.html",
    "/assets/../../app.py",
    "/assets/..%2f..%2fapp.py",
    "/assets/%2e%2e/%2e%2e/app.py",
    "/assets/%252e%252e/%252e%252e/app.py",
    "/assets/..\\..\\app.py",
    "/assets/..%5c..%5capp.py",
    "/assets/..;/..;/app.py",
    "/assets//etc/passwd",
    "/assets/%00",
    "/assets/index.html%00.js",
    "/../../../../etc/passwd",
    "//etc/passwd",
    "/v1/runs/../../../../etc/passwd",
    "/v1/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/runs/..%5c..%5cetc%5cpasswd/curves?line=run.loss",
    "/v1/runs/a;b%00c/matrix?metric=head.risk",
    "/v1/commands/..%2f..%2fetc%2fpasswd",
    "file:///etc/passwd",
    "http://127.0.0.1/../../etc/passwd",
]


def send_raw(url: str, target: str) -> tuple[int, bytes]:
    """Send a request line without normalisation and return the status code and the whole response."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        head = f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode("latin-1"))
        response = b""
        while part := connection.recv(65536):
            response += part
    return int(response[9:12]), response


@pytest.mark.promise("S14")
def test_path_traversal_never_reaches_a_file(live_service: LiveService) -> None:
    for target in TRAVERSALS:
        status, response = send_raw(live_service.url, target)
        assert status in (400, 404, 422), target  # 422 if the target contains a NUL
        assert b"root:" not in response
        assert b"create_app" not in response


@pytest.mark.promise("S14")
async def test_run_named_like_a_path_creates_no_file(service: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    codes = {}
    for name in ("../../escape", "/etc/passwd", "a/../../b", "....//c"):
        rank = FakeRank(run=name)
        codes[name] = (await service.post(rank.batch(rank.started(), rank.sample(1)))).status_code
    assert sorted(tmp_path.rglob("*")) == before
    assert codes == {"../../escape": 422, "/etc/passwd": 200, "a/../../b": 422, "....//c": 200}
    assert len((await service.get("/v1/runs"))["runs"]) == 2
