"""What arrives is data: it is never run, never unpickled, and never becomes a path."""

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from foreshock.server.testing import FakeRank, LiveService

pytestmark = pytest.mark.promise("S14")


WAYS = [
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


def asked(url: str, target: str) -> tuple[int, bytes]:
    """The status and the rest of the answer to a request line sent as it stands."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        head = f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode("latin-1"))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer[9:12]), answer


def test_no_spelling_of_a_path_leads_to_a_file(live_service: LiveService) -> None:
    for target in WAYS:
        status, answer = asked(live_service.url, target)
        assert status in (400, 404, 422), target  # 422: a NUL in it
        assert b"root:" not in answer
        assert b"create_app" not in answer


async def test_a_run_named_like_a_path_is_a_row_and_no_file(service: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for name in ("../../escape", "/etc/passwd", "a/../../b", "....//c"):
        rank = FakeRank(run=name)
        await service.store(rank, rank.started(), rank.sample(1))
    assert sorted(tmp_path.rglob("*")) == before
    assert len((await service.get("/v1/runs"))["runs"]) == 4
