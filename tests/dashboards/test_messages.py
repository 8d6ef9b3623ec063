"""What people are sent, as a real Alertmanager renders it and delivers it to a receiver."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx
import pytest
from tests.dashboards.shipped import TEMPLATES, Receivers, alertmanager_config

REPOSITORY = Path(__file__).parents[2]
NOW = datetime(2026, 11, 21, 3, 4, tzinfo=UTC)
LABELS = {
    "alertname": "ForeshockHeadFailing",
    "run": "a<b>&c",
    "severity": "critical",
    "cause": "rounding",
}
ANNOTATIONS = {
    "summary": "Run a<b>&c: rounding in layer 0 head 2",
    "description": "The signal offset tripped. Largest |score| reaches 512 in about 1.8k steps.",
    "done": "The head is switched.",
    "action": "Switch the head to exact_delta.",
    "page_url": "http://127.0.0.1:8765/?runs=a",
    "dashboard_url": "http://127.0.0.1:3000/d/foreshock-run?var-run=a",
    "runbook_url": "docs/runbooks/ForeshockHeadFailing.md",
}
FIRING = """\
Run a<b>&c: rounding in layer 0 head 2.
The signal offset tripped. Largest |score| reaches 512 in about 1.8k steps.
Done: The head is switched.
To do: Switch the head to exact_delta.
Since 2026-11-21 03:04 UTC.
Evidence and switch: http://127.0.0.1:8765/?runs=a
Dashboard: http://127.0.0.1:3000/d/foreshock-run?var-run=a
Runbook: docs/runbooks/ForeshockHeadFailing.md"""


class Receiver(BaseHTTPRequestHandler):
    """Takes what Slack would be sent, and what the service's webhook would."""

    said: "Queue[tuple[str, dict[str, Any]]]"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.said.put((self.path, body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Stand:
    """A real Alertmanager under the generated configuration, and the receiver that it knows."""

    def __init__(self, url: str, said: "Queue[tuple[str, dict[str, Any]]]") -> None:
        self.url, self.said = url, said

    def alert(self, *alerts: dict[str, Any]) -> None:
        """Hand over alerts, as Prometheus does."""
        httpx.post(f"{self.url}/api/v2/alerts", json=list(alerts), trust_env=False).raise_for_status()

    def slack(self, seconds: float = 20.0) -> dict[str, Any]:
        """The next message to people."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                path, body = self.said.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                pytest.fail(f"no message to people within {seconds:g} s")
            if path == "/slack":
                attachment: dict[str, Any] = body["attachments"][0]
                return attachment


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    said: Queue[tuple[str, dict[str, Any]]] = Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Receiver,), {"said": said}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "slack_url").write_text(f"{here}/slack")
    (tmp_path / "alertmanager.yml").write_text(
        alertmanager_config(
            f"{here}/service",
            None,
            templates=TEMPLATES,
            receivers=Receivers(slack=tmp_path / "slack_url"),
            group_wait="100ms",
            group_interval="1s",
        )
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus-alertmanager",
                f"--config.file={tmp_path}/alertmanager.yml",
                f"--storage.path={tmp_path}/data",
                f"--web.listen-address={address}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(200):
            try:
                if httpx.get(f"http://{address}/-/ready", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        else:
            pytest.fail(f"Alertmanager was not ready:\n{(tmp_path / 'log').read_text()[-2000:]}")
        yield Stand(f"http://{address}", said)
    finally:
        process.terminate()
        process.wait(20)
        server.shutdown()
        server.server_close()


def alert(**changes: Any) -> dict[str, Any]:
    """The warning as Prometheus hands it over."""
    return {"labels": LABELS, "annotations": ANNOTATIONS, "startsAt": NOW.isoformat()} | changes


@pytest.mark.servers
def test_people_read_what_where_why_how_long_what_was_done_and_where_to_look(stand: Stand) -> None:
    stand.alert(alert())
    fired = stand.slack()
    assert fired["title"] == f"Critical: {ANNOTATIONS['summary']}"
    assert fired["text"] == FIRING
    stand.alert(alert(endsAt=(datetime.now(UTC) - timedelta(seconds=1)).isoformat()))
    over = stand.slack()
    assert over["title"] == f"No longer alerting: {ANNOTATIONS['summary']}"
    assert "Either its warnings are over or the run has ended, since 20" in over["text"]
    assert "To do" not in over["text"]


@pytest.mark.servers
def test_several_alerts_of_a_run_make_one_message_and_missing_annotations_leave_no_hole(stand: Stand) -> None:
    kept = {key: ANNOTATIONS[key] for key in ("summary", "description", "action")}
    stand.alert(*(alert(labels=LABELS | {"cause": cause}, annotations=kept) for cause in ("a", "b", "c")))
    while not (text := stand.slack())["title"].startswith("Critical: 3 alerts"):
        pass  # the first may leave before Alertmanager has read all of them; the fixture's clock ends a wait in vain
    assert text["title"] == "Critical: 3 alerts ForeshockHeadFailing in run a<b>&c"
    assert text["text"].count(ANNOTATIONS["summary"]) == 3
    assert text["text"].count("To do: Switch the head to exact_delta.") == 1
    assert "<no value>" not in text["text"]
    assert "Done:" not in text["text"]


@pytest.mark.servers
def test_96_alerts_of_a_run_are_one_readable_message_that_says_how_bad_the_worst_is(stand: Stand) -> None:
    """One for each head, of either severity, as rules that a user writes may send them."""
    labels = LABELS | {"run": "x" * 128, "severity": "warning"}
    heads = [alert(labels=labels | {"head": str(head)}) for head in range(95)]
    stand.alert(*heads, alert(labels=labels | {"head": "95", "severity": "critical"}))
    whole = f"Critical: 96 alerts ForeshockHeadFailing in run {'x' * 128}"
    while (text := stand.slack())["title"] != whole:  # the first may leave before Alertmanager has read all of them
        assert len(text["text"]) < 1500
    assert len(text["text"]) < 1500
    assert "96 in all" in text["text"]
