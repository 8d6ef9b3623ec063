"""Who is told what, as a real Prometheus finds it and a real Alertmanager delivers it under the generated files."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.dashboards.shipped import SWITCHING, TEMPLATES, Receivers, alertmanager_config, prometheus_config
from tests.e2e.running import alertmanager, eventually, prometheus, starter

from foreshock.dashboards.rules import Links, prometheus_rules
from foreshock.server.http.webhooks import SWITCHING_ALERTS

pytestmark = pytest.mark.servers


@dataclass
class World:
    """What is scraped, and every message that was sent: (path, body)."""

    metrics: Callable[[], str | None] = lambda: ""
    said: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def to(self, path: str) -> list[dict[str, Any]]:
        """What this receiver was sent."""
        return [body for at, body in self.said if at == path]

    def alerts(self, path: str) -> set[tuple[str, str]]:
        """(alert, run) of every firing alert that this receiver got."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("run", ""))
            for body in self.to(path)
            for alert in body["alerts"]
            if alert["status"] == "firing"
        }


class Handler(BaseHTTPRequestHandler):
    """The scraped service, and every receiver."""

    world: World

    def do_GET(self) -> None:
        text = self.world.metrics()
        self.send_response(200 if text is not None else 503)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write((text or "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.world.said.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def outside(world: World) -> Iterator[str]:
    """The address of the world's server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"world": world}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def told(folder: Path, world: World) -> Iterator[str]:
    """Prometheus with the shipped rules, a minute of which is 250 ms here, and Alertmanager; the latter's address."""
    rules = prometheus_rules(Links())
    for rule in rules["groups"][0]["rules"]:
        for key in ("for", "keep_firing_for"):
            if key in rule:
                rule[key] = re.sub(r"(\d+)m", lambda minutes: f"{250 * int(minutes[1])}ms", rule[key])
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    with outside(world) as here, starter(folder) as start:
        config = alertmanager_config(
            f"http://{here}/service",
            None,
            templates=TEMPLATES,
            receivers=Receivers(
                slack=f"http://{here}/slack",
                webhook=f"http://{here}/people",
                dead_mans_switch=f"http://{here}/dead-mans-switch",
            ),
            group_wait="1s",
            group_interval="2s",
            watchdog_interval="1s",
            fleet_wait="4s",
            fleet_interval="8s",
        )
        called = alertmanager(start, folder, config)
        pace: dict[str, Any] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        prometheus(start, folder, prometheus_config(here, folder / "rules.yml", called.address, **pace))
        yield called.url


def silent_runs(count: int) -> str:
    """The exposition of runs that were heard of ten minutes ago."""
    then = time.time() - 600
    names = [f"sweep-{number}" for number in range(count)]
    heard = [f'foreshock_run_last_heard_timestamp_seconds{{run="{name}"}} {then}' for name in names]
    return "\n".join([*heard, *(f'foreshock_run_active{{run="{name}"}} 1' for name in names), ""])


@pytest.mark.full
def test_two_hundred_runs_that_fall_silent_make_two_messages_at_most_and_two_when_they_are_back(
    tmp_path: Path,
) -> None:
    back = threading.Event()
    world = World(lambda: "foreshock_run_active 0\n" if back.is_set() else silent_runs(200))
    with told(tmp_path, world):
        silent = {("ForeshockRunUnreachable", f"sweep-{number}") for number in range(200)}
        eventually("every silent run in a message of the service's", lambda: world.alerts("/service") >= silent)
        eventually("a message to people", lambda: bool(world.to("/slack")))
        back.set()
        eventually("the word that it is over", lambda: "Resolved" in json.dumps(world.to("/slack")))
        messages = [body["attachments"][0] for body in world.to("/slack")]
    fired = [message for message in messages if "Resolved" not in message["title"]]
    assert len(fired) <= 2
    assert "200 alerts ForeshockRunUnreachable" in fired[-1]["title"]
    assert len(messages) - len(fired) <= 2


@pytest.mark.full
def test_a_dead_service_is_told_to_people_and_not_to_itself_and_holds_back_what_follows_from_it(
    tmp_path: Path,
) -> None:
    dead = threading.Event()
    world = World(lambda: None if dead.is_set() else silent_runs(1))
    with told(tmp_path, world) as address:
        eventually("the watchdog outside", lambda: len(world.to("/dead-mans-switch")) > 1)
        eventually("the silent run", lambda: ("ForeshockRunUnreachable", "sweep-0") in world.alerts("/people"))
        dead.set()
        eventually("the dead service", lambda: ("ForeshockServiceDown", "") in world.alerts("/people"))
        late = {"alertname": "ForeshockRunHung", "run": "late", "severity": "warning"}
        httpx.post(f"{address}/api/v2/alerts", json=[{"labels": late}], trust_env=False).raise_for_status()

        def state() -> str:
            found = httpx.get(f"{address}/api/v2/alerts", trust_env=False).json()
            return str(next(a["status"]["state"] for a in found if a["labels"] == late))

        eventually("an alert of a run held back", lambda: state() == "suppressed")
    assert ("ForeshockServiceDown", "") not in world.alerts("/service")
    assert ("ForeshockRunHung", "late") not in world.alerts("/people")


@pytest.mark.full
def test_a_run_s_alerts_are_one_message_and_a_critical_one_holds_its_warnings_back_but_never_a_switch(
    tmp_path: Path,
) -> None:
    world = World(lambda: "up_and_well 1\n")

    def alert(name: str, run: str, severity: str, **labels: str) -> dict[str, Any]:
        return {"labels": {"alertname": name, "run": run, "severity": severity, **labels}, "annotations": {}}

    with told(tmp_path, world) as address:
        eventually("the watchdog", lambda: bool(world.to("/service")) or bool(world.to("/dead-mans-switch")))
        given = [
            alert("ForeshockLossJumped", "a", "critical"),
            alert("ForeshockSwitchNotArrested", "a", "critical"),
            alert("ForeshockAgentFault", "a", "warning"),
            alert(SWITCHING, "a", "warning", layer="0", head="1"),
            alert("ForeshockAgentFault", "b", "warning"),
        ]
        httpx.post(f"{address}/api/v2/alerts", json=given, trust_env=False).raise_for_status()
        eventually("run b", lambda: ("ForeshockAgentFault", "b") in world.alerts("/people"))
        eventually("run a", lambda: ("ForeshockLossJumped", "a") in world.alerts("/people"))
        eventually("the switch", lambda: (SWITCHING, "a") in world.alerts("/service"))
    [of_a] = [body for body in world.to("/people") if body["groupLabels"] == {"run": "a"}]
    told_of_a = {alert["labels"]["alertname"] for alert in of_a["alerts"]}
    assert told_of_a == {"ForeshockLossJumped", "ForeshockSwitchNotArrested", SWITCHING}
    assert ("ForeshockAgentFault", "a") not in world.alerts("/service")


def test_what_is_never_held_back_is_what_the_service_switches_by() -> None:
    assert frozenset({SWITCHING}) == frozenset(SWITCHING_ALERTS)
