"""What an alert says: where, why, how long, what was done, what to do, and where its link leads."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.dashboards.promtool import WARNED, promtool, warned

from foreshock.contract.catalog import BY_KEY
from foreshock.contract.decision import CAUSES, UNTOLD_SCOPE, Act, decision
from foreshock.dashboards.rules import alerts
from foreshock.monitor.policy import SwitchScope

STATES = ("open", "switched", "arrested", "not arrested")
FORECASTS = [
    ("a", 2, 5, "rounding", 2500),
    ("a", 3, 7, "rounding", 1800),  # the soonest of this run and cause
    ("a", 4, 1, "score growth", 900),
    ("b", 0, 0, "rounding", 12),
]


@pytest.mark.servers
def test_the_warning_says_where_why_how_long_and_what_to_do(tmp_path: Path) -> None:
    series = {
        warned("critical"): "1x5",
        'foreshock_incident_forecast_steps{run="a",cause="rounding"}': "1800x5",
        'foreshock_incident_heads{run="a",cause="rounding"}': "96x5",
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
        "summary": "Run a is on its way to a loss explosion (rounding, heads: 96)",
        "description": "All warnings of this cause are one incident; the page ranks its heads by how soon they come to "
        "harm. The first head's largest |score| reaches 512 in about 1.8k steps.",
        "done": "Nothing is switched: the run's policy is observe.",
        "action": "Switch every head to the run's mitigation.",
        "runbook_url": "docs/runbooks/ForeshockHeadFailing.md",
        "dashboard_url": "http://127.0.0.1:3000/d/foreshock-run?var-run=a",
        "page_url": "http://127.0.0.1:8765/?runs=a&head=3.7&metric=head.score_offset&steps=1214567-",
    }
    result = promtool(tmp_path, [annotation_test(series, expected)])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.servers
def test_a_head_past_the_limit_is_said_to_be_there_and_not_to_come_there_in_no_steps(tmp_path: Path) -> None:
    of = 'run="a",cause="rounding"'
    series = {warned("critical"): "1x5", f"foreshock_incident_forecast_steps{{{of}}}": "0x5"}
    result = promtool(tmp_path, [annotation_test(series, {})])
    said = result.stdout + result.stderr
    assert "The first head's largest |score| is past 512." in said.replace("\\", "")
    assert "in about 0 steps" not in said


@pytest.mark.servers
def test_no_alert_speaks_of_a_switch_that_cannot_help_or_of_steps_that_nobody_knows(tmp_path: Path) -> None:
    labels = {"cause": "not finite", "act": "none"}
    of = 'run="a",cause="not finite"'
    series = {
        warned("critical", **labels): "1x5",
        f"foreshock_incident_heads{{{of}}}": "0x5",
        f"foreshock_incident_opened_step{{{of}}}": "999x5",
        'foreshock_run_step{run="a"}': "1005x5",
        f'foreshock_warning_active{{{of},layer="",head="",signal="nonfinite",severity="critical"}}': "1x5",
    }
    result = promtool(tmp_path, [annotation_test(series, {}, **labels)])
    said = result.stdout + result.stderr
    assert "Run a computes numbers that are not finite (not finite, the whole run)" in said
    assert "Nothing is switched: no switch repairs what is not finite." in said
    assert "Stop the run and resume from a checkpoint before the first warning" in said
    assert "unknown" not in said
    assert '/?runs=a&metric=run.loss"' in said.replace("\\u0026", "&"), "the run is shown from its beginning"


@pytest.mark.servers
def test_the_link_of_an_incident_without_a_forecast_names_one_of_its_heads(tmp_path: Path) -> None:
    labels = {"cause": "not finite", "act": "none"}
    signal = 'cause="not finite",signal="nonfinite",severity="critical"'
    series = {
        warned("critical", **labels): "1x5",
        f'foreshock_warning_active{{run="a",layer="",head="",{signal}}}': "1x5",
        f'foreshock_warning_active{{run="a",layer="11",head="4",{signal}}}': "1x5",
        f'foreshock_warning_active{{run="b",layer="9",head="9",{signal}}}': "1x5",
    }
    result = promtool(tmp_path, [annotation_test(series, {}, **labels)])
    said = result.stdout + result.stderr
    assert "/?runs=a&head=11.4&metric=run.loss" in said.replace("\\u0026", "&")


@pytest.mark.servers
@pytest.mark.parametrize(
    ("alert", "series", "labels", "place"),
    [
        (
            "ForeshockLossNotFinite",
            {'foreshock_run_loss{run="a"}': "NaN NaN NaN"},
            {"run": "a", "severity": "critical"},
            "&metric=run.loss",
        ),
        (
            "ForeshockNonFiniteRows",
            {
                'foreshock_layer_nonfinite_rows{run="a",layer="7"}': "12x5",
                'foreshock_head_nonfinite_rows{run="a",layer="7",head="3"}': "12x5",
                'foreshock_head_nonfinite_rows{run="a",layer="7",head="1"}': "2x5",
                'foreshock_head_nonfinite_rows{run="a",layer="8",head="0"}': "99x5",
            },
            {"run": "a", "layer": "7", "severity": "critical"},
            "&head=7.3&metric=head.nonfinite_rows",
        ),
        (
            "ForeshockSwitchNotArrested",
            {'foreshock_switch_not_arrested{run="a"}': "1x5"},
            {"run": "a", "severity": "critical"},
            "",
        ),
    ],
)
def test_the_link_of_every_alert_of_a_run_begins_a_thousand_steps_before_it(
    tmp_path: Path, alert: str, series: dict[str, str], labels: dict[str, str], place: str
) -> None:
    known = {'foreshock_run_step{run="a"}': "31000x5", 'foreshock_run_step{run="b"}': "9x5"}
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in (series | known).items()],
        "alert_rule_test": [{"alertname": alert, "eval_time": "2m", "exp_alerts": [{"exp_labels": labels}]}],
    }
    said = promtool(tmp_path, [case])
    told = (said.stdout + said.stderr).replace("\\u0026", "&")
    assert f'/?runs=a{place}&steps=30000-"' in told


@pytest.mark.parametrize(("cause", "state", "act"), [(c, s, a) for c in CAUSES for s in STATES for a in get_args(Act)])
def test_every_alert_says_of_what_was_done_what_the_one_decision_says(cause: Any, state: Any, act: Any) -> None:
    """The templates are a chain of conditions on labels, read here as Go reads them."""
    [alert] = BY_KEY["incident.active"].alerts
    policy: Any = {"none": "observe", "propose": "approve", "switch": "auto"}[act]
    progress: Any = "unswitched" if state == "open" else state
    made = decision(cause, policy, mitigation="the run's mitigation", scope=UNTOLD_SCOPE, progress=progress)
    labels = {"cause": cause, "state": state, "act": act}
    assert read_chain(alert.done, labels) == made.done
    assert read_chain(alert.to_do, labels) == made.to_do


@pytest.mark.parametrize("act", ["propose", "switch"])
def test_no_alert_claims_which_heads_are_switched_where_its_labels_do_not_tell_it(act: str) -> None:
    [alert] = BY_KEY["incident.active"].alerts
    policy: Any = {"propose": "approve", "switch": "auto"}[act]
    said = read_chain(alert.done, {"cause": "rounding", "state": "open", "act": act})
    for scope in get_args(SwitchScope):
        assert said != decision("rounding", policy, mitigation="the run's mitigation", scope=scope).done
    assert "switch_scope" in said


def test_an_alert_tells_to_switch_heads_only_where_rounding_is_the_cause() -> None:
    for _, alert in alerts():
        for sentence in re.split(r"(?<=[.:;]) ", alert.action):
            if re.search(r"every head switched|[Ss]witch (every|the) head", sentence):
                assert "rounding" in sentence, f"{alert.name}: {sentence}"


def read_chain(template: str, labels: dict[str, str]) -> str:
    """The text of the first condition that holds in `{{ if A }}a{{ else if B }}b{{ end }}`."""
    for condition, text in re.findall(r"\{\{ (?:else )?if (.*?) \}\}(.*?)(?=\{\{)", template):
        if all(labels[name] == value for name, value in re.findall(r'eq \$labels\.(\w+) "([^"]*)"', condition)):
            return str(text)
    raise AssertionError(f"nothing is said of {labels}")


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
