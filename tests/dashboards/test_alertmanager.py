"""Routing, grouping and inhibition of alerts by a real Prometheus and Alertmanager with the generated files."""

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
class Recorder:
    """The metrics to scrape, and every message received: (path, body)."""

    metrics: Callable[[], str | None] = lambda: ""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def to(self, path: str) -> list[dict[str, Any]]:
        """The messages to this receiver."""
        return [body for at, body in self.messages if at == path]

    def alerts(self, path: str) -> set[tuple[str, str]]:
        """(alert, run) of every firing alert that this receiver got."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("run", ""))
            for body in self.to(path)
            for alert in body["alerts"]
            if alert["status"] == "firing"
        }


class Handler(BaseHTTPRequestHandler):
    """The scraped service and every receiver of messages."""

    recorder: Recorder

    def do_GET(self) -> None:
        text = self.recorder.metrics()
        self.send_response(200 if text is not None else 503)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write((text or "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.recorder.messages.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def http_server(recorder: Recorder) -> Iterator[str]:
    """Serve the recorder; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"recorder": recorder}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def alerting(folder: Path, recorder: Recorder) -> Iterator[str]:
    """Prometheus and Alertmanager with the shipped rules, whose minutes last 250 ms; yields Alertmanager's address."""
    rules = prometheus_rules(Links())
    for rule in rules["groups"][0]["rules"]:
        for key in ("for", "keep_firing_for"):
            if key in rule:
                rule[key] = re.sub(r"(\d+)m", lambda minutes: f"{250 * int(minutes[1])}ms", rule[key])
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    with http_server(recorder) as address, starter(folder) as start:
        config = alertmanager_config(
            f"http://{address}/service",
            None,
            templates=TEMPLATES,
            receivers=Receivers(
                slack=f"http://{address}/slack",
                webhook=f"http://{address}/people",
                dead_mans_switch=f"http://{address}/dead-mans-switch",
            ),
            group_wait="1s",
            group_interval="2s",
            watchdog_interval="1s",
            fleet_wait="4s",
            fleet_interval="8s",
        )
        manager = alertmanager(start, folder, config)
        pace: dict[str, Any] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        prometheus(start, folder, prometheus_config(address, folder / "rules.yml", manager.address, **pace))
        yield manager.url


def silent_runs(count: int) -> str:
    """Metrics of runs whose last heartbeat was ten minutes ago."""
    then = time.time() - 600
    names = [f"sweep-{number}" for number in range(count)]
    heard = [f'foreshock_run_last_heard_timestamp_seconds{{run="{name}"}} {then}' for name in names]
    return "\n".join([*heard, *(f'foreshock_run_active{{run="{name}"}} 1' for name in names), ""])


@pytest.mark.full
def test_200_silent_runs_send_at_most_two_messages_and_two_when_resolved(
    tmp_path: Path,
) -> None:
    resolved = threading.Event()
    recorder = Recorder(lambda: "foreshock_run_active 0\n" if resolved.is_set() else silent_runs(200))
    with alerting(tmp_path, recorder):
        silent = {("ForeshockRunUnreachable", f"sweep-{number}") for number in range(200)}
        eventually("every silent run in a message to the service", lambda: recorder.alerts("/service") >= silent)
        eventually("a message to people", lambda: bool(recorder.to("/slack")))
        resolved.set()
        eventually("the message that the alerts are resolved", lambda: "Resolved" in json.dumps(recorder.to("/slack")))
        messages = [body["attachments"][0] for body in recorder.to("/slack")]
    fired = [message for message in messages if "Resolved" not in message["title"]]
    assert len(fired) <= 2
    assert "200 alerts ForeshockRunUnreachable" in fired[-1]["title"]
    assert len(messages) - len(fired) <= 2


@pytest.mark.full
def test_service_down_alert_goes_only_to_people_and_inhibits_run_alerts(
    tmp_path: Path,
) -> None:
    dead = threading.Event()
    recorder = Recorder(lambda: None if dead.is_set() else silent_runs(1))
    with alerting(tmp_path, recorder) as address:
        eventually("the watchdog at the dead man's switch", lambda: len(recorder.to("/dead-mans-switch")) > 1)
        eventually("the silent run", lambda: ("ForeshockRunUnreachable", "sweep-0") in recorder.alerts("/people"))
        dead.set()
        eventually("the dead service", lambda: ("ForeshockServiceDown", "") in recorder.alerts("/people"))
        late_alert = {"alertname": "ForeshockRunHung", "run": "late", "severity": "warning"}
        httpx.post(f"{address}/api/v2/alerts", json=[{"labels": late_alert}], trust_env=False).raise_for_status()

        def state() -> str:
            alerts_now = httpx.get(f"{address}/api/v2/alerts", trust_env=False).json()
            return str(next(a["status"]["state"] for a in alerts_now if a["labels"] == late_alert))

        eventually("an inhibited alert of a run", lambda: state() == "suppressed")
    assert ("ForeshockServiceDown", "") not in recorder.alerts("/service")
    assert ("ForeshockRunHung", "late") not in recorder.alerts("/people")


@pytest.mark.full
def test_run_alerts_are_grouped_and_critical_ones_inhibit_warnings_except_switches(
    tmp_path: Path,
) -> None:
    recorder = Recorder(lambda: "up_and_well 1\n")

    def alert(name: str, run: str, severity: str, **labels: str) -> dict[str, Any]:
        return {"labels": {"alertname": name, "run": run, "severity": severity, **labels}, "annotations": {}}

    with alerting(tmp_path, recorder) as address:
        eventually("the watchdog", lambda: bool(recorder.to("/service")) or bool(recorder.to("/dead-mans-switch")))
        posted = [
            alert("ForeshockLossJumped", "a", "critical"),
            alert("ForeshockSwitchNotArrested", "a", "critical"),
            alert("ForeshockAgentFault", "a", "warning"),
            alert(SWITCHING, "a", "warning", layer="0", head="1"),
            alert("ForeshockAgentFault", "b", "warning"),
        ]
        httpx.post(f"{address}/api/v2/alerts", json=posted, trust_env=False).raise_for_status()
        eventually("run b", lambda: ("ForeshockAgentFault", "b") in recorder.alerts("/people"))
        eventually("run a", lambda: ("ForeshockLossJumped", "a") in recorder.alerts("/people"))
        eventually("the switch", lambda: (SWITCHING, "a") in recorder.alerts("/service"))
    [of_a] = [body for body in recorder.to("/people") if body["groupLabels"] == {"run": "a"}]
    alerts_of_a = {alert["labels"]["alertname"] for alert in of_a["alerts"]}
    assert alerts_of_a == {"ForeshockLossJumped", "ForeshockSwitchNotArrested", SWITCHING}
    assert ("ForeshockAgentFault", "a") not in recorder.alerts("/service")


def test_uninhibited_alert_is_the_one_that_orders_switches() -> None:
    assert frozenset({SWITCHING}) == frozenset(SWITCHING_ALERTS)
