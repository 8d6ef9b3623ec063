"""A server on a real socket with a configurable reply: valid, invalid, slow or none."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Handler = Callable[["HostileServer", socket.socket, bytes], None]


class HostileServer:
    """Listens on loopback. `behaviour` gets the connection and the request body, and may be changed at any time."""

    def __init__(self, behaviour: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = behaviour
        self._tls = tls
        self.batches: list[dict[str, Any]] = []
        """Every batch that arrived completely."""
        self.headers: list[str] = []
        self.requests_at: list[float] = []
        self.commands: list[dict[str, Any]] = []
        """Commands to include in the next acknowledgement."""
        self.asks_for: str | None = None
        """Every acknowledgement to this boot requests its `started` event."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closing = threading.Event()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            suppress(OSError, ValueError),
            connection if self._tls is None else self._with_tls(connection) as connection,
        ):
            while (body := self._read_request(connection)) is not None:
                self.requests_at.append(time.monotonic())
                self.batches.append(json.loads(body))
                self.behaviour(self, connection, body)

    def _with_tls(self, connection: socket.socket) -> socket.socket:
        return connection if self._tls is None else self._tls.wrap_socket(connection, server_side=True)

    def _read_request(self, connection: socket.socket) -> bytes | None:
        data = b""
        while b"\r\n\r\n" not in data:
            chunk = connection.recv(65536)
            if not chunk:
                return None
            data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        self.headers.append(head.decode("latin-1"))
        length = next((int(v) for k, v in map(_header, head.split(b"\r\n")[1:]) if k == b"content-length"), 0)
        while len(body) < length:
            chunk = connection.recv(65536)
            if not chunk:
                return None
            body += chunk
        return body

    def sequences(self, boot: str | None = None) -> list[int]:
        """Sequences of the batches received, in order of arrival."""
        return [b["sequence"] for b in self.batches if boot is None or b["boot"] == boot]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of this kind in every batch received."""
        return [event for batch in self.batches for event in batch["events"] if event["kind"] == kind]

    def close(self) -> None:
        """Close the listener and every connection."""
        self._closing.set()
        for s in (self._listener, *self._connections):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def reply(
    connection: socket.socket, status: int, body: bytes, *headers: str, content_type: str = "application/json"
) -> None:
    """Send one complete response."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", f"Content-Type: {content_type}", *headers]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def acknowledge(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    """Acknowledge the batch, with the pending commands, and request `started` if `asks_for` is its boot."""
    batch = json.loads(body)
    commands, server.commands = server.commands, []
    ack = {"boot": batch["boot"], "acknowledged": batch["sequence"], "commands": commands}
    ack["send_started"] = batch["boot"] == server.asks_for
    reply(connection, 200, json.dumps(ack).encode())


def answer(status: int, *headers: str, body: bytes = b"{}") -> Handler:
    """Always reply with this status."""
    return lambda _server, connection, _body: reply(connection, status, body, *headers)


def hang(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    """Read the request and never reply."""
    time.sleep(3600)


def drip(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    """Send the header byte by byte, without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        connection.sendall(b"a")
        time.sleep(0.05)


def close_mid_body(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    """Announce 1000 bytes, send one, close."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
    connection.close()


def endless(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    """Send a body without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


@contextmanager
def hostile_server(behaviour: Handler, tls: ssl.SSLContext | None = None) -> Iterator[HostileServer]:
    """Run a server until the end of the block."""
    server = HostileServer(behaviour, tls)
    try:
        yield server
    finally:
        server.close()


def closed_port() -> str:
    """A URL whose port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"http://127.0.0.1:{s.getsockname()[1]}"
