"""Every alert has a page for the person it wakes, and the pages name only what exists."""

import re
from pathlib import Path

import pytest
from tests.dashboards.promql import charts

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Alert
from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, alerts
from foreshock.server.settings import Settings

RUNBOOKS = Path(__file__).parents[2] / "docs/runbooks"
ALERTS = [alert for _, alert in alerts()]

every_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)


@every_alert
def test_an_alert_has_a_page_that_begins_with_what_to_do_and_says_what_it_means_and_how_to_look(alert: Alert) -> None:
    title, first, *_ = (RUNBOOKS / f"{alert.name}.md").read_text().split("\n\n")
    assert title == f"# {alert.name}"
    assert first == alert.action
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["What it means", "Look", "Do"]


def test_no_page_is_left_over_from_an_alert_that_is_gone() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert.name for alert in ALERTS}


@every_alert
def test_a_page_names_only_panels_metrics_and_settings_that_exist(alert: Alert) -> None:
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    titles = {board["title"].removeprefix("foreshock / ") for board in boards(Links()).values()}
    panels = {panel["title"] for board in boards(Links()).values() for panel in charts(board)}
    metrics = {metric.name for metric in METRICS} | {metric.layer_name for metric in HEAD_METRICS}
    for named in re.findall(r"[Bb]oards? \*([^*]+)\*", text):
        assert named in titles
    for listing in re.findall(r"[Pp]anels? ((?:\*[^*]+\*(?:, | and )?)+)", text):
        assert set(re.findall(r"\*([^*]+)\*", listing)) <= panels
    assert set(re.findall(r"foreshock_\w+", text)) <= metrics
    assert {name.lower() for name in re.findall(r"FORESHOCK_(\w+)", text)} <= set(Settings.model_fields)
