"""A started sender, events for it, and the steps that a hostile server received."""

import ssl
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e import running
from tests.faults.hostile_server import HostileServer
from tests.overrides import settings_with

from foreshock.contract import wire
from foreshock.monitor import AgentConfig
from foreshock.monitor.transport.sender import Sender

CERTIFICATE = Path(__file__).parents[1] / "server" / "loopback_certificate.pem"
"""Certificate and key of hooks.example.com."""
BUSY_SECONDS = 20.0
"""Tolerance added to deadlines on a busy machine; only a hang takes longer."""
eventually = partial(running.eventually, every=0.01)
IN_ORDER_SECONDS = 30.0
"""Upper bound for a clean shutdown, which writes and releases the spool; a close returns as soon as it is done."""


def started_sender(url: str, spool: Path | None = None, *, boot: str = "boot-1", **settings: Any) -> Sender:
    defaults: dict[str, Any] = {"send_every_seconds": 0.02, "request_seconds": 0.4, "heartbeat_seconds": 60}
    config = settings_with(AgentConfig, run="a-run", url=url, spool_directory=spool, **{**defaults, **settings})
    sender = Sender(config, run="a-run", boot=boot, health=lambda: (7, {"detectors": 1}))
    sender.start()
    return sender


def tls_of_hooks() -> ssl.SSLContext:
    """A TLS context with the certificate of hooks.example.com."""
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
