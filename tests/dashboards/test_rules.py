"""Alert rules as Grafana reads them."""

from pathlib import Path
from typing import Any

import yaml

from foreshock.contract.catalog import WATCHDOG
from foreshock.dashboards.generate import GENERATED
from foreshock.dashboards.rules import Links, alerts, rules

REPOSITORY = Path(__file__).parents[2]


def generated(name: str) -> Any:
    """A committed generated YAML file as data."""
    return yaml.safe_load((REPOSITORY / GENERATED / name).read_text())


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
