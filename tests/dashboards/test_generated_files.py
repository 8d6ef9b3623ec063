"""The generated files are what the catalogue says, and the programs that read them accept them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from foreshock.contract.catalog import WATCHDOG
from foreshock.dashboards.alertmanager import alertmanager_config
from foreshock.dashboards.generate import GENERATED, check, files, generate
from foreshock.dashboards.provisioning import prometheus_config
from foreshock.dashboards.rules import Links, alerts, rules

REPOSITORY = Path(__file__).parents[2]


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def generated(name: str) -> Any:
    """A committed generated YAML file as data."""
    return yaml.safe_load((REPOSITORY / GENERATED / name).read_text())


# Committed and checked


def test_the_committed_files_are_what_the_catalogue_says() -> None:
    assert check(REPOSITORY) == [], "run `foreshock dashboards generate` and commit the result"


def test_check_finds_what_was_edited_what_is_missing_and_what_is_left_over(tmp_path: Path) -> None:
    generate(tmp_path)
    assert check(tmp_path) == []
    edited, missing, left = (
        GENERATED / name for name in ("alertmanager.yml", "prometheus-rules.yml", "boards/old.json")
    )
    (tmp_path / edited).write_text("edited")
    (tmp_path / missing).unlink()
    (tmp_path / left).write_text("{}")
    assert check(tmp_path) == sorted([edited, missing, left])


@pytest.mark.parametrize("path", files(Links()), ids=str)
def test_a_generated_file_says_so(path: Path) -> None:
    assert "Generated from contract/catalog.py by `foreshock dashboards generate`" in (REPOSITORY / path).read_text()


def test_addresses_of_another_installation_reach_rules_and_boards(tmp_path: Path) -> None:
    generate(tmp_path, Links(grafana="https://g.example/", service="https://s.example", runbooks="https://r.example"))
    text = (tmp_path / GENERATED / "prometheus-rules.yml").read_text()
    assert "https://g.example/d/foreshock-run?var-run=" in text
    assert "runbook_url: https://r.example/ForeshockHeadFailing.md" in text
    assert "https://s.example" in (tmp_path / GENERATED / "boards/run.json").read_text()
    assert "127.0.0.1" not in text


# Read by the programs they are for


@pytest.mark.servers
@pytest.mark.parametrize("remote_write_url", [None, "http://127.0.0.1:8428/api/v1/write"])
def test_prometheus_accepts_its_configuration(tmp_path: Path, remote_write_url: str | None) -> None:
    generate(tmp_path)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        prometheus_config(
            "127.0.0.1:8765",
            tmp_path / GENERATED / "prometheus-rules.yml",
            "127.0.0.1:9093",
            scrape_interval="500ms",
            evaluation_interval="1s",
            token_file=config,
            remote_write_url=remote_write_url,
        )
    )
    assert "SUCCESS: 1 rule files found" in run("promtool", "check", "config", str(config))


@pytest.mark.parametrize("interval", ["", "15", "1m30s", "-1s", "1d"])
def test_an_interval_that_is_no_duration_is_refused_with_a_sentence(interval: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write a whole number with ms, s, m or h"):
        prometheus_config("a:1", Path("rules.yml"), "b:2", scrape_interval=interval)


@pytest.mark.servers
def test_alertmanager_accepts_its_configuration_and_gives_the_watchdog_its_own_route(tmp_path: Path) -> None:
    config = tmp_path / "alertmanager.yml"
    config.write_text(alertmanager_config("http://127.0.0.1:8765/v1/webhooks/alertmanager", config))
    assert "4 receivers" in run("amtool", "check-config", str(config))
    route = ("amtool", "config", "routes", "test", f"--config.file={config}")
    assert run(*route, "alertname=ForeshockHeadFailing", "severity=critical", "run=a").strip() == "service,people"
    assert run(*route, f"alertname={WATCHDOG.name}", "severity=none").strip() == "watchdog,dead-mans-switch"
    assert run(*route, "alertname=ForeshockServiceDown", "severity=critical").strip() == "people"
    assert run(*route, "alertname=ForeshockAlertPathBroken", "severity=warning").strip() == "service,people"


# What the other provisioning files hold


def test_a_token_stands_in_a_file_and_never_in_a_configuration() -> None:
    scrape = generated("prometheus.yml")["scrape_configs"][0]
    assert scrape["authorization"] == {"type": "Bearer", "credentials_file": "/run/secrets/foreshock_read_token"}
    receivers = {receiver["name"]: receiver for receiver in generated("alertmanager.yml")["receivers"]}
    assert receivers["people"] == {"name": "people"}, "whom to wake is the installation's choice"
    for receiver in (receivers["service"], receivers["watchdog"]):
        authorization = receiver["webhook_configs"][0]["http_config"]["authorization"]
        assert authorization == {"type": "Bearer", "credentials_file": "/run/secrets/foreshock_webhook_token"}
    hmac = generated("grafana-alerting.yml")["contactPoints"][0]["receivers"][0]["settings"]["hmacConfig"]
    assert hmac["secret"] == "$__file{/run/secrets/foreshock_grafana_hmac_secret}"


def test_the_rate_interval_of_grafana_is_the_scrape_interval_of_prometheus() -> None:
    source = generated("grafana/datasources/prometheus.yml")["datasources"][0]
    assert source["jsonData"]["timeInterval"] == generated("prometheus.yml")["global"]["scrape_interval"]


def test_grafana_is_given_every_rule_with_texts_that_it_can_read() -> None:
    provisioned = generated("grafana-alerting.yml")["groups"][0]["rules"]
    assert [rule["title"] for rule in provisioned] == [alert.name for _, alert in alerts()]
    assert len({rule["uid"] for rule in provisioned}) == len(provisioned)
    assert all(len(rule["uid"]) <= 40 for rule in provisioned)
    texts = [text for rule in provisioned for text in rule["annotations"].values()]
    assert not [text for text in texts if "| query" in text], "Grafana's templates have no query function"
    assert not [text for text in texts if "$value " in text], "Grafana's $value is a sentence, not a number"
    assert any("{{ $values.A.Value | humanize }}" in text for text in texts)


def test_grafana_expands_variables_in_labels_so_they_hold_none() -> None:
    provisioned = generated("grafana-alerting.yml")["groups"][0]["rules"]
    assert not [rule["title"] for rule in provisioned if "$" in "".join(rule["labels"].values())]
    assert not [rule["title"] for rule in provisioned if "$" in rule["data"][0]["model"]["expr"]]


def test_the_watchdog_travels_oftener_than_the_rule_on_its_absence_allows() -> None:
    late = next(rule for rule in rules(Links()) if rule.alert.name == "ForeshockAlertPathBroken")
    assert late.expr.endswith("> 300")
    routes = [
        *generated("alertmanager.yml")["route"]["routes"][:2],
        generated("grafana-alerting.yml")["policies"][0]["routes"][0],
    ]
    for route in routes:
        assert WATCHDOG.name in str(route.get("matchers", route.get("object_matchers")))
        assert route["group_interval"] == route["repeat_interval"] == "30s"
