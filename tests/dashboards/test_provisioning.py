"""The configuration of Prometheus, Alertmanager and Grafana: accepted by them, consistent, without secrets."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.dashboards.shipped import PROVISIONING, alertmanager_config, prometheus_config

from foreshock.contract.metrics.catalog import SERVICE_DOWN, WATCHDOG
from foreshock.dashboards.generate import generate
from foreshock.dashboards.rules import DATASOURCE_UID, FOLDER, SCRAPE_INTERVAL_SECONDS, Links, rules


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def shipped(name: str) -> Any:
    """A file of dashboards/provisioning as data."""
    return yaml.safe_load((PROVISIONING / name).read_text())


@pytest.mark.servers
@pytest.mark.parametrize("remote_write_url", [None, "http://127.0.0.1:8428/api/v1/write"])
def test_prometheus_accepts_its_configuration(tmp_path: Path, remote_write_url: str | None) -> None:
    generate(tmp_path, Links())
    config = tmp_path / "prometheus.yml"
    config.write_text(
        prometheus_config(
            "127.0.0.1:8765",
            tmp_path / "prometheus-rules.yml",
            "127.0.0.1:9093",
            scrape_interval="500ms",
            evaluation_interval="1s",
            token_file=config,
            remote_write_url=remote_write_url,
        )
    )
    assert "SUCCESS: 1 rule files found" in run("promtool", "check", "config", str(config))


@pytest.mark.servers
def test_alertmanager_accepts_its_configuration_and_routes_alerts(tmp_path: Path) -> None:
    config = tmp_path / "alertmanager.yml"
    config.write_text(alertmanager_config("http://127.0.0.1:8765/v1/webhooks/alertmanager", config))
    assert "4 receivers" in run("amtool", "check-config", str(config))
    route = ("amtool", "config", "routes", "test", f"--config.file={config}")
    assert run(*route, "alertname=ForeshockHeadFailing", "severity=critical", "run=a").strip() == "service,people"
    assert run(*route, f"alertname={WATCHDOG.name}", "severity=none").strip() == "watchdog,dead-mans-switch"
    assert run(*route, "alertname=ForeshockServiceDown", "severity=critical").strip() == "people"
    assert run(*route, "alertname=ForeshockAlertPathBroken", "severity=warning").strip() == "service,people"


def test_tokens_are_read_from_files() -> None:
    scrape = shipped("prometheus.yml")["scrape_configs"][0]
    assert scrape["authorization"] == {"type": "Bearer", "credentials_file": "/run/secrets/foreshock_read_token"}
    receivers = {receiver["name"]: receiver for receiver in shipped("alertmanager.yml")["receivers"]}
    assert receivers["people"] == {"name": "people"}, "each installation chooses its own receivers"
    for receiver in (receivers["service"], receivers["watchdog"]):
        authorization = receiver["webhook_configs"][0]["http_config"]["authorization"]
        assert authorization == {"type": "Bearer", "credentials_file": "/run/secrets/foreshock_webhook_token"}


def test_provisioning_files_use_existing_alerts_jobs_folders_and_data_sources() -> None:
    known = {rule["alert"] for rule in rules(Links())}
    mentioned = set(re.findall(r"Foreshock\w+", (PROVISIONING / "alertmanager.yml").read_text()))
    assert mentioned - known == set()
    assert {WATCHDOG.name, SERVICE_DOWN.name} <= mentioned
    for name in ("prometheus.yml", "prometheus-victoriametrics.yml"):
        config = shipped(name)
        [scrape] = config["scrape_configs"]
        assert f'{{job="{scrape["job_name"]}"}}' in SERVICE_DOWN.expr
        assert config["global"]["scrape_interval"] == f"{SCRAPE_INTERVAL_SECONDS}s"
    [source] = shipped("grafana/datasources/prometheus.yml")["datasources"]
    assert (source["uid"], source["jsonData"]["timeInterval"]) == (DATASOURCE_UID, f"{SCRAPE_INTERVAL_SECONDS}s")
    assert shipped("grafana/dashboards/boards.yml")["providers"][0]["folder"] == FOLDER
    assert {**shipped("prometheus.yml"), "remote_write": shipped("prometheus-victoriametrics.yml")["remote_write"]} == (
        shipped("prometheus-victoriametrics.yml")
    )


def test_watchdog_repeats_more_often_than_its_absence_alert_requires() -> None:
    path_broken = next(rule for rule in rules(Links()) if rule["alert"] == "ForeshockAlertPathBroken")
    assert path_broken["expr"].endswith("> 300")
    for route in shipped("alertmanager.yml")["route"]["routes"][:2]:
        assert WATCHDOG.name in str(route["matchers"])
        assert route["group_interval"] == route["repeat_interval"] == "30s"
