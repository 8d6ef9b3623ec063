"""Who connects and then does nothing, or next to nothing, takes nobody's place."""

import resource
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from foreshock.server.testing import FakeRank, LiveService, post

SECRET = "a-secret-of-sixteen-or-more"
SILENT = {
    "nothing": b"",
    "a line without an end": b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "empty lines": b"\r\n\r\n",
    "a body that does not come": (
        b"POST /v1/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    ),
}
FEW = {"FORESHOCK_TOKEN": SECRET}
SOON = {"request_seconds": 3.0}


def connected(service: LiveService) -> socket.socket:
    address = urlsplit(service.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=30)


def ended(connection: socket.socket) -> bool:
    """Whether the service closes the connection, be it after an answer."""
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
def test_a_strangers_packets_write_next_to_nothing_into_the_log(tmp_path: Path, packet: bytes) -> None:
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
def test_a_deadline_holds_for_every_request_of_a_connection_and_not_between_them(tmp_path: Path) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + SECRET.encode() + b"\r\n\r\n"
    with LiveService(tmp_path, FEW, **SOON) as service, ExitStack() as opened:
        connections = [opened.enter_context(connected(service)) for _ in SILENT]
        for connection, sent in zip(connections, SILENT.values(), strict=True):
            connection.sendall(sent)
        last = opened.enter_context(connected(service))
        for _ in range(4):
            last.sendall(whole)
            answered = b""
            while not answered.endswith(b"}"):
                answered += last.recv(65_536)
            assert answered.startswith(b"HTTP/1.1 200")
            time.sleep(1.0)  # together longer than one request may take
        last.sendall(SILENT["a line without an end"])
        assert all(map(ended, [*connections, last]))


@pytest.mark.promise("S4")
def test_health_and_ranks_are_answered_beside_more_silent_connections_than_a_shell_lets_a_process_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, 4096))
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=few))
    with LiveService(tmp_path, FEW, request_seconds=600.0) as service, ExitStack() as opened:
        for number in range(400):
            opened.enter_context(connected(service)).sendall(list(SILENT.values())[number % 3])
        rank = FakeRank()
        with service.client(SECRET) as client:
            assert client.get("/readyz").status_code == 200
            for step in range(5):
                assert client.get("/healthz").status_code == 200
                assert post(client, rank.batch(rank.started(), rank.sample(step + 1))).status_code == 200


@pytest.mark.promise("S5")
def test_headers_without_an_end_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    with LiveService(tmp_path, FEW, **SOON) as service, connected(service) as connection:
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
