"""Alert rules beside the routes that their alerts take."""

from pathlib import Path
from typing import Any

import yaml

from foreshock.contract.catalog import WATCHDOG
from foreshock.dashboards.generate import GENERATED
from foreshock.dashboards.rules import Links, rules

REPOSITORY = Path(__file__).parents[2]


def generated(name: str) -> Any:
    """A committed generated YAML file as data."""
    return yaml.safe_load((REPOSITORY / GENERATED / name).read_text())


def test_the_watchdog_travels_oftener_than_the_rule_on_its_absence_allows() -> None:
    late = next(rule for rule in rules(Links()) if rule.alert.name == "ForeshockAlertPathBroken")
    assert late.expr.endswith("> 300")
    for route in generated("alertmanager.yml")["route"]["routes"][:2]:
        assert WATCHDOG.name in str(route["matchers"])
        assert route["group_interval"] == route["repeat_interval"] == "30s"
