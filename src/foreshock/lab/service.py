"""A service of its own for a demo, a replay or a picture."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import TimeoutExpired

from foreshock.server.child import ServiceProcess


@contextmanager
def local_service(directory: Path, port: int) -> Iterator[str]:
    """Serve on loopback with a store under `directory`; yields the address. Port 0 takes a free one.

    Raises OSError with the service's own words when it does not start.
    """
    service = ServiceProcess(directory, {"FORESHOCK_PORT": str(port)}).start()
    try:
        yield service.url
    finally:
        with suppress(TimeoutExpired):  # it was ended all the same
            service.stop(15.0)
