"""Alert rules beside the routes that their alerts take."""

import pytest
import yaml
from tests.dashboards.shipped import PROVISIONING

from foreshock.contract.metrics.catalog import BY_KEY, WATCHDOG
from foreshock.dashboards.rules import Links, _place, rules


def test_the_watchdog_travels_oftener_than_the_rule_on_its_absence_allows() -> None:
    late = next(rule for rule in rules(Links()) if rule["alert"] == "ForeshockAlertPathBroken")
    assert late["expr"].endswith("> 300")
    for route in yaml.safe_load((PROVISIONING / "alertmanager.yml").read_text())["route"]["routes"][:2]:
        assert WATCHDOG.name in str(route["matchers"])
        assert route["group_interval"] == route["repeat_interval"] == "30s"


@pytest.mark.parametrize(
    ("key", "first"), [("head.entropy", "bottomk(1, foreshock_head_entropy"), ("head.score_max", "topk(1, ")]
)
def test_the_link_of_an_alert_leads_to_the_lowest_head_where_low_is_bad(key: str, first: str) -> None:
    assert first in _place(BY_KEY[key])
