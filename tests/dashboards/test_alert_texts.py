"""Annotations of alerts (place, cause, time, action taken, action needed), their links, and their runbooks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.dashboards.promql import charts
from tests.dashboards.promtool import WARNED, Labels, promtool, warned

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Alert
from foreshock.dashboards.boards import boards
from foreshock.dashboards.rules import Links, alerts
from foreshock.server.settings import Settings

FORECASTS = [
    ("a", 2, 5, "rounding", 2500),
    ("a", 3, 7, "rounding", 1800),  # the earliest for this run and cause
    ("a", 4, 1, "score growth", 900),
    ("b", 0, 0, "rounding", 12),
]


NOT_FINITE = 'cause="not finite",signal="nonfinite",severity="critical"'
WORDS = {
    "heads": "layer 3 head 7 and layer 2 head 5",
    "sentence": "Scores drift in two heads, since step 1,234,567.",
    "done": "No head was switched: the run's policy is observe.",
    "to_do": 'Switch every head to row_corrected. Type: foreshock switch a --mode row_corrected --reason "rounding"',
}


def words_series(cause: str = "rounding") -> dict[str, str]:
    """The series in which the service exports the text of an incident of run a."""
    labels = {"run": "a", "cause": cause} | WORDS
    return {f"foreshock_incident_words{{{','.join(f'{k}={json.dumps(v)}' for k, v in labels.items())}}}": "1x5"}


@pytest.mark.servers
@pytest.mark.promise("S24")
def test_alert_annotations_repeat_the_incident_text_of_the_service(tmp_path: Path) -> None:
    series = {
        warned("critical"): "1x5",
        **words_series(),
        'foreshock_incident_opened_step{run="a",cause="rounding"}': "1234567x5",
        'foreshock_incident_opened_step{run="a",cause="score growth"}': "1000000x5",
        'foreshock_run_step{run="a"}': "1244567x5",
        **{
            f'foreshock_warning_active{{run="{run}",layer="{layer}",head="{head}",cause="{cause}",signal="offset",'
            'severity="warning"}': "1x5"
            for run, layer, head, cause, _ in FORECASTS
        },
        **{
            f'foreshock_warning_forecast_steps{{run="{run}",layer="{layer}",head="{head}"}}': f"{left}x5"
            for run, layer, head, _, left in FORECASTS
        },
    }
    expected = {
        "summary": "Run a: attention becomes unstable in layer 3 head 7 and layer 2 head 5 (rounding)",
        "description": WORDS["sentence"],
        "done": WORDS["done"],
        "action": WORDS["to_do"],
        "runbook_url": "docs/runbooks/ForeshockHeadFailing.md",
        "dashboard_url": "http://127.0.0.1:3000/d/foreshock-run?var-run=a",
        "page_url": "http://127.0.0.1:8765/?runs=a&head=3.7&metric=head.score_offset&steps=1214567-",
    }
    result = promtool(tmp_path, [annotation_test(series, expected)])
    assert result.returncode == 0, result.stdout + result.stderr


PLACES: dict[str, tuple[str, Labels, dict[str, str]]] = {
    "&metric=run.loss": (
        "ForeshockLossNotFinite",
        {"run": "a", "severity": "critical"},
        {'foreshock_run_loss{run="a"}': "NaN NaN NaN"},
    ),
    "&head=7.3&metric=head.nonfinite_rows": (
        "ForeshockNonFiniteRows",
        {"run": "a", "layer": "7", "severity": "critical"},
        {
            'foreshock_layer_nonfinite_rows{run="a",layer="7"}': "12x5",
            'foreshock_head_nonfinite_rows{run="a",layer="7",head="3"}': "12x5",
            'foreshock_head_nonfinite_rows{run="a",layer="7",head="1"}': "2x5",
            'foreshock_head_nonfinite_rows{run="a",layer="8",head="0"}': "99x5",
        },
    ),
    "": (
        "ForeshockSwitchNotArrested",
        {"run": "a", "severity": "critical"},
        {'foreshock_switch_not_arrested{run="a"}': "1x5"},
    ),
    "&head=11.4&metric=run.loss": (
        "ForeshockHeadFailing",
        {"run": "a", "severity": "critical", "cause": "not finite"},
        {
            warned("critical", cause="not finite"): "1x5",
            f'foreshock_warning_active{{run="a",layer="",head="",{NOT_FINITE}}}': "1x5",
            f'foreshock_warning_active{{run="a",layer="11",head="4",{NOT_FINITE}}}': "1x5",
            f'foreshock_warning_active{{run="b",layer="9",head="9",{NOT_FINITE}}}': "1x5",
            'foreshock_incident_opened_step{run="a",cause="not finite"}': "31000x5",
        },
    ),
}
"""The place in an alert's link, by the alert, its labels, and the series on which it fires."""


@pytest.mark.servers
def test_alert_link_names_an_affected_head_and_starts_1000_steps_earlier(tmp_path: Path) -> None:
    """If the series budget dropped the text of an incident, the alert links to the run's page."""
    known = {'foreshock_run_step{run="a"}': "31000x5", 'foreshock_run_step{run="b"}': "9x5"}
    cases = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in (series | known).items()],
            "alert_rule_test": [{"alertname": alert, "eval_time": "2m", "exp_alerts": [{"exp_labels": labels}]}],
        }
        for alert, labels, series in PLACES.values()
    ]
    result = promtool(tmp_path, cases)
    output = (result.stdout + result.stderr).replace("\\u0026", "&")
    assert [place for place in PLACES if f'/?runs=a{place}&steps=30000-"' not in output] == []
    assert "Run a: attention becomes unstable in some heads (not finite)" in output
    assert "Open the run's page and follow its instructions." in output


def test_alert_action_suggests_switching_heads_only_for_rounding() -> None:
    for _, alert in alerts():
        for sentence in re.split(r"(?<=[.:;]) ", alert.action):
            if re.search(r"every head switched|[Ss]witch (every|the) head", sentence):
                assert "rounding" in sentence, f"{alert.name}: {sentence}"


def annotation_test(series: dict[str, str], annotations: dict[str, str], **changes: str) -> dict[str, Any]:
    """A promtool case that compares every label and annotation of a critical incident."""
    labels = WARNED | changes | {"severity": "critical"}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "alertname": "ForeshockHeadFailing",
                "eval_time": "2m",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}],
            }
        ],
    }


RUNBOOKS = Path(__file__).parents[2] / "docs/runbooks"
ALERTS = [alert for _, alert in alerts()]

every_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)


@every_alert
def test_alert_has_a_runbook_that_starts_with_its_action(alert: Alert) -> None:
    title, first, *_ = (RUNBOOKS / f"{alert.name}.md").read_text().split("\n\n")
    assert title == f"# {alert.name}"
    assert first == alert.action
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["What it means", "Look", "Do"]


def test_every_runbook_belongs_to_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert.name for alert in ALERTS}


@every_alert
def test_runbook_names_only_existing_panels_metrics_and_settings(alert: Alert) -> None:
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
