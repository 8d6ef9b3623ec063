"""A sender as the agent starts one, what it is given, and what a hostile server saw of it."""

import ssl
from functools import partial
from pathlib import Path
from typing import Any

from tests.constants import settings_with
from tests.e2e import running
from tests.faults.hostile_server import HostileServer

from foreshock.contract import wire
from foreshock.monitor import AgentConfig
from foreshock.monitor.transport.sender import Sender

CERTIFICATE = Path(__file__).parents[1] / "server" / "loopback_certificate.pem"
"""Of hooks.example.com, with its key."""
BUSY_SECONDS = 20.0
"""What a machine with other work may add to a deadline: only a hang takes longer."""
eventually = partial(running.eventually, every=0.01)
IN_ORDER_SECONDS = 30.0
"""More than a process needs to end in order, its spool written and let go of; it waits no longer than it needs."""


def started_sender(url: str, spool: Path | None = None, *, boot: str = "boot-1", **settings: Any) -> Sender:
    quick: dict[str, Any] = {"send_every_seconds": 0.02, "request_seconds": 0.4, "heartbeat_seconds": 60}
    config = settings_with(AgentConfig, run="a-run", url=url, spool_directory=spool, **{**quick, **settings})
    made = Sender(config, run="a-run", boot=boot, health=lambda: (7, {"detectors": 1}))
    made.start()
    return made


def tls_of_hooks() -> ssl.SSLContext:
    """TLS of a server that speaks as hooks.example.com."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)
    return tls


def sample(step: int) -> wire.Sample:
    return wire.Sample(step=step, since_step=step - 1, unix_seconds=0.0, loss=float(step))


SWITCHED = wire.Switched(
    id="s", step=1, outcome="applied", heads=((0, 1),), before=("plain",), after=("row_corrected",), reason="auto"
)


def send(to: Sender, *steps: int) -> None:
    for step in steps:
        to.put(sample(step))


def steps_at(server: HostileServer) -> list[int]:
    return sorted({event["step"] for event in server.events("sample")})
