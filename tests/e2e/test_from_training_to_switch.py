"""The whole path with real training: a run drifts, Prometheus fires, Alertmanager calls, a user approves, heads switch.

Two real trainings run in parallel: one with the paper's rounding, and a control with float32 attention. With a kernel's
own rounding, a run of this recipe is warned about later, and with some seeds and processors not at all. Nothing is
injected. Rules and thresholds are the shipped ones, except that a drift is reported even if the forecast harm is far
away, as in the demo, and that the intervals of Prometheus and Alertmanager are shorter.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.dashboards.shipped import alertmanager_config, prometheus_config
from tests.e2e.running import Start, alertmanager, eventually, free_port, prometheus

ROOT = Path(__file__).parents[2]
RULES = ROOT / "src/foreshock/dashboards" / "generated" / "prometheus-rules.yml"
SEED = 110
TIMEOUT_SECONDS = 3000.0
"""Timeout for a training to reach an event; the warning comes after about 2000 steps."""

TRAIN = """
import sys, torch
from dataclasses import replace
from foreshock.lab.training.variant import find_variant
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training, train
from foreshock.monitor.detect.detectors import DetectorConfig
torch.set_num_threads(1)
variant_name, policy, run, url, seed = sys.argv[1:]
recipe = find_recipe("key-bias-small")
variant = replace(find_variant(variant_name), policy=policy)
training = Training(recipe, variant, int(seed), run=run, url=url, detectors=DetectorConfig(horizon_windows=None))
train(training, recipe.steps)
"""


@dataclass(frozen=True)
class Stack:
    """The running servers."""

    service: str
    prometheus: str

    def get(self, path: str, **query: Any) -> Any:
        return httpx.get(self.service + path, params=query, timeout=60).raise_for_status().json()

    def alerts(self) -> list[dict[str, Any]]:
        """The labels of firing alerts in Prometheus, without the watchdog."""
        data = httpx.get(self.prometheus + "/api/v1/alerts", timeout=60).raise_for_status().json()["data"]
        return [
            alert["labels"]
            for alert in data["alerts"]
            if alert["state"] == "firing" and alert["labels"]["alertname"] != "ForeshockWatchdog"
        ]


@pytest.fixture
def stack(start: Start, tmp_path: Path) -> Stack:
    port = free_port()
    database = f"sqlite:///{tmp_path / 'foreshock.db'}"
    serve = [sys.executable, "-P", "-m", "foreshock", "serve", "--port", str(port), "--database-url", database]
    service = start(serve, port, "/readyz")
    hook = service.url + "/v1/webhooks/alertmanager"
    waits: dict[str, Any] = {"group_wait": "1s", "group_interval": "2s", "watchdog_interval": "2s"}
    manager = alertmanager(start, tmp_path, alertmanager_config(hook, None, **waits))
    intervals: dict[str, Any] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    scraper = prometheus(start, tmp_path, prometheus_config(service.address, RULES, manager.address, **intervals))
    return Stack(service.url, scraper.url)


@pytest.fixture
def trainings(stack: Stack, tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The run with the paper's numerics, under policy approve, and its control."""
    running = {}
    for run, variant in (("untreated", "paper"), ("control", "control")):
        with (tmp_path / f"{run}.log").open("wb") as log:
            running[run] = subprocess.Popen(
                [sys.executable, "-P", "-c", TRAIN, variant, "approve", run, stack.service, str(SEED)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    yield running
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.servers
@pytest.mark.timeout(7200)
def test_drifting_run_gets_a_warning_and_a_switch_but_its_control_gets_neither(
    stack: Stack, trainings: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    def check_processes() -> None:
        for variant, process in trainings.items():
            if process.poll():
                pytest.fail(
                    f"{variant} ended with {process.returncode}:\n{(tmp_path / f'{variant}.log').read_text()[-2000:]}"
                )

    def fired() -> dict[str, Any] | None:
        check_processes()
        alerts = [alert for alert in stack.alerts() if alert["alertname"] == "ForeshockHeadFailing"]
        return alerts[0] if alerts else None

    # The rule fires with the shipped thresholds; its incident names the head that the agent warned about first.
    alert = eventually("ForeshockHeadFailing fires", fired, TIMEOUT_SECONDS, every=0.5)
    assert alert["run"] == "untreated"
    [incident] = [i for i in stack.get("/v1/runs/untreated/incidents")["incidents"] if i["cause"] == alert["cause"]]
    layer, head = incident["heads"][0]["layer"], incident["heads"][0]["head"]
    warnings = stack.get("/v1/runs/untreated")["warnings"]
    assert [layer, head] in [[warning["layer"], warning["head"]] for warning in warnings]

    # Alertmanager delivers the alert. Under policy approve nothing is switched yet, and the head has one open proposal
    # whether the agent or the webhook was first: the audit trail shows both, the second as a duplicate.
    def delivered() -> list[dict[str, Any]]:
        rows = stack.get("/v1/audit", limit=100)["rows"]
        head_pair = [[layer, head]]
        return [
            r for r in rows if r["actor"] == "alertmanager" and r["details"].get("head", head_pair[0]) == head_pair[0]
        ]

    eventually("Alertmanager's webhook arrives", delivered)
    proposals = [c for c in stack.get("/v1/runs/untreated/commands")["commands"] if [layer, head] in c["heads"]]
    assert [c["state"] for c in proposals] == ["proposed"]
    command = proposals[0]
    assert head_mode(stack, layer, head) == "plain"

    # A user approves; the command reaches the agent with its next batch, and the next samples show the new mode.
    decision = {"who": "tester", "reason": "the evidence convinces"}
    httpx.post(f"{stack.service}/v1/commands/{command['id']}/approve", json=decision, timeout=60).raise_for_status()
    answered = eventually(
        "the agent answers", lambda: (c := stack.get(f"/v1/commands/{command['id']}"))["state"] == "applied" and c
    )
    assert set(answered["ranks"][0]["before"]) == {"plain"}  # all heads are switched, the default scope
    assert set(answered["ranks"][0]["after"]) == {command["mode"]}
    eventually("the samples show the new mode", lambda: head_mode(stack, layer, head) == command["mode"])
    eventually("Prometheus shows the new mode", lambda: prometheus_mode(stack, layer, head) > 0)

    # The audit trail has every state of the command; the watchdog proves that the alert path works.
    audit = stack.get("/v1/audit", limit=100)
    states = [row["details"].get("state") for row in audit["rows"] if row["command"] == command["id"]]
    assert {"proposed", "pending", "delivered", "applied"} <= set(states)
    assert "foreshock_service_watchdog_timestamp_seconds" in httpx.get(stack.service + "/metrics", timeout=60).text

    # The control reaches at least the same step without a warning.
    switched_at = answered["ranks"][0]["step"]

    def control_caught_up() -> bool:
        check_processes()
        step = stack.get("/v1/runs/control")["last_step"]
        return step is not None and step >= switched_at

    eventually("the control reaches the switch step", control_caught_up, TIMEOUT_SECONDS, every=0.5)
    assert stack.get("/v1/runs/control")["warnings"] == []
    assert [e for e in stack.get("/v1/runs/control/events")["events"] if e["kind"] == "verdict"] == []
    assert [alert for alert in stack.alerts() if alert.get("run") == "control"] == []


def head_mode(stack: Stack, layer: int, head: int) -> str | None:
    """The mode of a head in the run's last sample."""
    entry = next(e for e in stack.get("/v1/runs/untreated")["layers"] if e["layer"] == layer)
    mode: str | None = entry["modes"][entry["heads"].index(head)]
    return mode


def prometheus_mode(stack: Stack, layer: int, head: int) -> float:
    """The mode flag of a head in Prometheus; 0 if the series does not exist."""
    query = f'foreshock_head_mode{{run="untreated",layer="{layer}",head="{head}"}}'
    reply = httpx.get(stack.prometheus + "/api/v1/query", params={"query": query}, timeout=60).raise_for_status()
    result = reply.json()["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0
