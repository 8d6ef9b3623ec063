"""One address before several replicas: a TCP proxy that passes each connection to a replica that listens."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from urllib.parse import urlsplit


class Balancer:
    """Takes the replicas in turn, and the next one where one is down. `urls` gives where they listen now."""

    def __init__(self, urls: Callable[[], Sequence[str]]) -> None:
        self._urls, self._turn = urls, count()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            urls = self._urls()
            first = next(self._turn)
            for offset in range(len(urls)):
                address = urlsplit(urls[(first + offset) % len(urls)])
                try:
                    replica = socket.create_connection((address.hostname or "", address.port or 0), timeout=5)
                except OSError:
                    continue
                with replica:
                    replica.settimeout(None)
                    back = threading.Thread(target=_pass, args=(replica, client), daemon=True)
                    back.start()
                    _pass(client, replica)
                    back.join()
                return

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one side to the other, until one of them goes away; then both are told."""
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for side in (source, sink):
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


@contextmanager
def balancer(urls: Callable[[], Sequence[str]]) -> Iterator[Balancer]:
    """A balancer for the length of a test."""
    made = Balancer(urls)
    try:
        yield made
    finally:
        made.close()
