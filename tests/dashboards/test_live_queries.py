"""A real Prometheus and a real Alertmanager under the generated configuration.

A stand-in for the service shows one series of every metric of the catalogue; every query of every board must find
something, every rule must load, and a warning must travel to the webhook with its token. The test under tests/e2e does
the same with the service and a training run.
"""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreshock.contract.catalog import HEAD_METRICS, METRICS, Metric
from foreshock.dashboards.live import Query, ask, queries
from foreshock.dashboards.provisioning import alertmanager_config, prometheus_config, to_yaml
from foreshock.dashboards.rules import Links, alerts, prometheus_rules

pytestmark = pytest.mark.servers

TOKEN = "a-token-of-the-test"
LABELS = {"run": "a", "layer": "0", "head": "2", "severity": "critical", "result": "refused"}
PATIENCE_SECONDS = 30.0


def page(scrape: int) -> str:
    """What the stand-in shows at its n-th scrape: counters grow, times are now, everything else is 1."""
    lines = []
    for metric in METRICS:
        names = {metric.name: metric.labels}
        if metric in HEAD_METRICS:
            names[metric.layer_name] = ("run", "layer")
        for name, labels in names.items():
            pairs = ",".join(f'{label}="{LABELS.get(label, label)}"' for label in labels)
            lines.append(f"# TYPE {name} {metric.kind}\n{name}{{{pairs}}} {value(metric, scrape)}\n")
    return "".join(lines)


def value(metric: Metric, scrape: int) -> float:
    """A plausible value of a metric at the n-th scrape."""
    if metric.kind == "counter":
        return scrape
    return time.time() if metric.unit == "timestamp_seconds" else 1


class StandIn(ThreadingHTTPServer):
    """Answers /metrics as the service does, and remembers the webhooks that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scrapes = 0
        self.deliveries: list[Any] = []
        self.strangers: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def _reply(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _known(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            return True
        self.server.strangers.append(self.path)
        self._reply(401)
        return False

    def do_GET(self) -> None:
        if self._known():
            self.server.scrapes += 1
            self._reply(200, page(self.server.scrapes))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._known():
            self.server.deliveries.append(json.loads(body))
            self._reply(200)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(log: Path, *command: str) -> Iterator[None]:
    """A server that is stopped at the end; what it said is shown when the test fails."""
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as running:
        try:
            yield
        except BaseException:
            print(log.read_text())
            raise
        finally:
            running.terminate()
            running.wait(timeout=10)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; a server that is not up yet counts as not yet."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:.0f} s")


@dataclass
class Stack:
    """Everything that runs."""

    stand_in: StandIn
    prometheus: str
    alertmanager: str


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with ExitStack() as running:
        stand_in = running.enter_context(StandIn())
        thread = threading.Thread(target=stand_in.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        running.callback(thread.join)
        running.callback(stand_in.shutdown)
        target = f"127.0.0.1:{stand_in.server_port}"
        prometheus, alertmanager = (f"127.0.0.1:{free_port()}" for _ in range(2))
        (folder / "token").write_text(TOKEN)
        (folder / "rules.yml").write_text(to_yaml(prometheus_rules(Links())))
        (folder / "prometheus.yml").write_text(
            prometheus_config(
                target,
                folder / "rules.yml",
                alertmanager,
                scrape_interval="500ms",
                evaluation_interval="500ms",
                token_file=folder / "token",
            )
        )
        (folder / "alertmanager.yml").write_text(
            alertmanager_config(
                f"http://{target}/v1/webhooks/alertmanager",
                folder / "token",
                group_wait="100ms",
                group_interval="1s",
                watchdog_interval="1s",
            )
        )
        nice = ("nice", "-n", str(max(0, 10 - os.nice(0))))
        running.enter_context(
            process(
                folder / "alertmanager.log",
                *nice,
                "prometheus-alertmanager",
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alertmanager",
                f"--web.listen-address={alertmanager}",
                "--cluster.listen-address=",
            )
        )
        running.enter_context(
            process(
                folder / "prometheus.log",
                *nice,
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/prometheus",
                f"--web.listen-address={prometheus}",
                # What fires before Prometheus has found Alertmanager is lost, and sent again after this (default 1m).
                "--rules.alert.resend-delay=1s",
            )
        )
        wait_for("eight scrapes", lambda: stand_in.scrapes >= 8)
        yield Stack(stand_in, f"http://{prometheus}", f"http://{alertmanager}")


def test_every_query_of_every_board_and_rule_finds_something(stack: Stack) -> None:
    asked = list(queries())
    answers = ask(stack.prometheus, asked, run="a", rate_interval="4s", window="10s", resolution="1s")
    assert len(answers) == len(asked) > 80
    assert not [answer for answer in answers if answer.error]
    assert not [answer.query.where for answer in answers if not answer.series]


def test_a_query_that_finds_nothing_or_is_wrong_is_told_apart(stack: Stack) -> None:
    unknown = Query("here", "panel", 'foreshock_run_loss{run="unknown"}')
    mistake = Query("there", "panel", "rate(foreshock_run_loss)")
    nothing, wrong = ask(stack.prometheus, [unknown, mistake], run="a")
    assert (nothing.series, nothing.error) == (0, "")
    assert wrong.series == 0
    assert "expected type range vector" in wrong.error


def test_prometheus_loads_every_rule_and_finds_no_fault_in_evaluating_it(stack: Stack) -> None:
    def evaluated() -> list[dict[str, Any]]:
        groups = httpx.get(f"{stack.prometheus}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_for("every rule evaluated", lambda: all(rule["health"] != "unknown" for rule in evaluated()))
    assert {rule["name"]: rule["health"] for rule in evaluated()} == {alert.name: "ok" for _, alert in alerts()}


def test_a_warning_and_the_watchdog_travel_to_the_webhook_with_the_token(stack: Stack) -> None:
    def delivered(name: str) -> list[Any]:
        return [
            alert
            for delivery in stack.stand_in.deliveries
            for alert in delivery["alerts"]
            if alert["labels"]["alertname"] == name
        ]

    wait_for("the warning", lambda: bool(delivered("ForeshockHeadFailing")))
    wait_for("the watchdog, again and again", lambda: len(delivered("ForeshockWatchdog")) >= 2)
    warning = delivered("ForeshockHeadFailing")[0]
    assert {label: warning["labels"][label] for label in ("run", "layer", "head", "severity")} == {
        "run": "a",
        "layer": "0",
        "head": "2",
        "severity": "critical",
    }
    assert warning["annotations"]["page_url"] == "http://127.0.0.1:8765/?runs=a"
    assert not stack.stand_in.strangers
