"""Every alert fires when it should, resolves, and stays silent when it should, as promtool evaluates it."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.dashboards.promtool import RUN, Labels, firing_series, promtool

from foreshock.dashboards.rules import Links, alerts, prometheus_rules


@dataclass(frozen=True)
class Case:
    """Series sampled every minute, and the labels of what fires at some of those minutes."""

    alert: str
    story: str
    series: dict[str, str]
    firing: dict[int, list[Labels]]

    @classmethod
    def told(cls, text: str) -> "Case":
        """A case as STORIES tells it."""
        title, *lines = text.splitlines()
        series: dict[str, str] = {}
        firing: dict[int, list[Labels]] = {}
        for line in map(str.strip, lines):
            if not line.startswith("at "):
                name, values = re.fullmatch(r"(\w+(?:\{.*?\})?) (.*)", line).groups()  # type: ignore[union-attr]
                series[name] = re.sub(r"(\w+)\*(\d+)", lambda many: " ".join([many[1]] * int(many[2])), values)
                continue
            for minutes, what in re.findall(r"at ([\d ]+?) (nothing|\{.*?\})(?=, at|$)", line):
                labels = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in re.findall(r"\{.*?\}", what)]
                firing |= dict.fromkeys(map(int, minutes.split()), labels)
        alert, story = title.split(" ", 1)
        return cls(alert, story, series, firing)


def counter_cases(alert: str, series: str, labels: Labels) -> list[Case]:
    """The three lives of a counter that should not grow."""
    return [
        Case(
            alert,
            "fires when the counter grows, resolves thirteen minutes later",
            {series: "0x3 4x30"},
            {3: [], 5: [labels], 30: []},
        ),
        Case(alert, "fires when the counter is born above zero", {series: "_x4 4x30"}, {3: [], 5: [labels], 30: []}),
        Case(alert, "is silent while the counter stands still", {series: "7x40"}, {30: [], 40: []}),
        Case(
            alert, "is silent when the service restarts and counts from zero", {series: "7x20 0x20"}, {19: [], 22: []}
        ),
    ]


STORIES = """
ForeshockNonFiniteRows fires while a layer has non-finite rows
    foreshock_layer_nonfinite_rows{run="a",layer="3"} 0 0 12 12 0x9
    at 1 nothing, at 2 {run="a", layer="3"}, at 8 nothing

ForeshockNonFiniteRows is silent on zero rows and on a layer that has no sample
    foreshock_layer_nonfinite_rows{run="a",layer="3"} 0x5
    foreshock_layer_nonfinite_rows{run="a",layer="4"} NaN NaN NaN NaN NaN NaN
    at 5 nothing

ForeshockRunHung fires when heartbeats come and no step does, resolves with the next step
    foreshock_run_last_heard_timestamp_seconds{run="a"} 0+60x40
    foreshock_run_last_step_timestamp_seconds{run="a"} 0+60x5 300x14 1200+60x20
    foreshock_run_step_time_seconds{run="a"} 0.5x40
    foreshock_run_active{run="a"} 1x40
    at 5 9 nothing, at 13 18 {run="a"}, at 25 nothing

ForeshockRunHung waits for twenty steps of a run whose steps take a minute
    foreshock_run_last_heard_timestamp_seconds{run="a"} 0+60x60
    foreshock_run_last_step_timestamp_seconds{run="a"} 0x45 2700+60x9
    foreshock_run_step_time_seconds{run="a"} 60x60
    foreshock_run_active{run="a"} 1x60
    at 15 20 nothing, at 23 {run="a"}, at 50 nothing

ForeshockRunHung gives a run that has shown no step time half an hour for its first step
    foreshock_run_last_heard_timestamp_seconds{run="a"} 0+60x60
    foreshock_run_last_step_timestamp_seconds{run="a"} 0x60
    foreshock_run_active{run="a"} 1x35 0x9
    at 29 nothing, at 33 {run="a"}, at 41 nothing

ForeshockRunHung is silent about runs that step, have finished, or are not heard of at all
    foreshock_run_last_heard_timestamp_seconds{run="a"} 0+60x40
    foreshock_run_last_step_timestamp_seconds{run="a"} 0+60x40
    foreshock_run_active{run="a"} 1x40
    foreshock_run_last_heard_timestamp_seconds{run="b"} 0x40
    foreshock_run_last_step_timestamp_seconds{run="b"} 0x40
    foreshock_run_step_time_seconds{run="b"} 0.5x40
    foreshock_run_active{run="b"} 1x40
    foreshock_run_last_heard_timestamp_seconds{run="c"} 0+60x40
    foreshock_run_last_step_timestamp_seconds{run="c"} 0x40
    foreshock_run_step_time_seconds{run="c"} 0.5x40
    foreshock_run_active{run="c"} 0x40
    at 4 10 35 nothing

ForeshockRunUnreachable fires when nothing is heard of an active run for six minutes, resolves after its next word
    foreshock_run_last_heard_timestamp_seconds{run="a"} 0+60x5 300x10 960+60x9
    foreshock_run_active{run="a"} 1x30
    at 5 10 nothing, at 13 {run="a"}, at 20 nothing

ForeshockRunUnreachable is silent when the run has finished, and about runs that still send
    foreshock_run_last_heard_timestamp_seconds{run="a"} 0x30
    foreshock_run_active{run="a"} 0x30
    foreshock_run_last_heard_timestamp_seconds{run="b"} 0+60x30
    foreshock_run_active{run="b"} 1x30
    at 30 nothing

ForeshockLossJumped fires when the loss goes from 1.0 to 3.1, and resolves when it is back
    foreshock_run_loss{run="a"} 1.0x30 3.1x20 1.02x20
    at 29 nothing, at 36 50 {run="a"}, at 60 nothing

ForeshockLossJumped is silent on a loss that falls or wavers, is small, zero, negative or not finite
    foreshock_run_loss{run="falls"} 11-0.1x90
    foreshock_run_loss{run="wavers"} 2.0 2.9 1.9 2.7 2.2 2.0 2.9 1.9 2.7 2.2 2.0 2.9 1.9 2.7 2.2 2.0x60
    foreshock_run_loss{run="small"} 0.01x30 0.2x60
    foreshock_run_loss{run="zero"} 0x30 1x60
    foreshock_run_loss{run="negative"} -8x30 -2x60
    foreshock_run_loss{run="nan"} 2.5x30 NaN*60
    at 12 34 40 60 nothing

ForeshockSwitchNotArrested fires while an applied switch has not stopped its heads, resolves when it is undone
    foreshock_switch_not_arrested{run="a"} 0x3 2x5 0x9
    at 3 nothing, at 5 {run="a"}, at 13 nothing

ForeshockSwitchNotArrested is silent where none does
    foreshock_switch_not_arrested{run="a"} 0x9
    at 9 nothing

ForeshockLossNotFinite fires on a loss of NaN, Inf or -Inf and resolves when it is finite again
    foreshock_run_loss{run="a"} 2.5x3 NaN NaN 2.4x9
    foreshock_run_loss{run="b"} 2.5x3 Inf Inf 2.4x9
    foreshock_run_loss{run="c"} 2.5x3 -Inf -Inf 2.4x9
    at 3 nothing, at 4 {run="a"} {run="b"} {run="c"}, at 10 nothing

ForeshockLossNotFinite is silent on a large, a zero and a negative loss, and on a run that ends
    foreshock_run_loss{run="a"} 1e38 0 -3 stale
    foreshock_run_loss{run="b"} 2 stale
    at 0 1 2 4 nothing

ForeshockBatchesRefused is silent about stored and repeated batches
    foreshock_service_batches_total{result="stored"} 0+60x30
    foreshock_service_batches_total{result="duplicate"} 0+5x30
    at 30 nothing

ForeshockHeadFailing fires at once with the incident's own severity, for each cause, and resolves when it is closed
    foreshock_incident_active{run="a",cause="rounding",state="open",act="none",severity="warning"} 0 1x5 0x9
    foreshock_incident_active{run="a",cause="not finite",state="open",act="none",severity="critical"} 0 0 1x12
    at 0 nothing, at 1 {run="a", cause="rounding", severity="warning"}
    at 4 {run="a", cause="rounding", severity="warning"} {run="a", cause="not finite", severity="critical"}
    at 10 {run="a", cause="not finite", severity="critical"}

ForeshockHeadFailing resolves when the warning's series disappears with its run
    foreshock_incident_active{run="a",cause="rounding",state="open",act="none",severity="warning"} 1x3 stale
    at 3 {run="a", cause="rounding", severity="warning"}, at 7 nothing

ForeshockHeadFailing is one alert through an approval and its undo, which change the state of the incident
    foreshock_incident_active{run="a",cause="rounding",state="open",act="none",severity="warning"} 1x3 0x2 1x6
    foreshock_incident_active{run="a",cause="rounding",state="switched",act="none",severity="warning"} 0x3 1x1 0x6
    at 3 5 9 {run="a", cause="rounding", severity="warning"}

ForeshockHeadFailing does not wake people for what was arrested
    foreshock_incident_active{run="a",cause="rounding",state="arrested",act="none",severity="info"} 1x10
    at 10 nothing

ForeshockCommandUnanswered fires when a command waits for five minutes on an active run, resolves when it is answered
    foreshock_service_commands_pending{run="a"} 0 1x8 0x9
    foreshock_run_active{run="a"} 1x20
    at 4 nothing, at 7 {run="a"}, at 14 nothing

ForeshockCommandUnanswered is silent when answers come soon, and on a run that has finished
    foreshock_service_commands_pending{run="a"} 0 1 0 1 0 1 0 1 0x5
    foreshock_run_active{run="a"} 1x20
    foreshock_service_commands_pending{run="b"} 1x20
    foreshock_run_active{run="b"} 0x20
    at 7 12 20 nothing

ForeshockAlertPathBroken fires when the watchdog stops arriving, resolves when it is back
    foreshock_service_watchdog_timestamp_seconds 60+60x5 360x10 1000+60x9
    at 5 nothing, at 14 {}, at 21 nothing

ForeshockAlertPathBroken is silent while watchdogs arrive, and where no Alertmanager was ever set up
    foreshock_service_watchdog_timestamp_seconds{job="one"} 60+60x30
    foreshock_service_watchdog_timestamp_seconds{job="two"} 0x30
    at 30 nothing

ForeshockSeriesDropped fires when series have been left out for ten minutes, resolves when they fit
    foreshock_service_series_dropped 0 500x15 0x9
    at 5 nothing, at 12 {}, at 21 nothing

ForeshockSeriesDropped is silent on a short excess
    foreshock_service_series_dropped 0 9x5 0x9
    at 9 nothing

ForeshockWatchdog fires always
    unrelated 1x5
    at 0 5 {}

ForeshockServiceDown fires when a scrape has failed for two minutes, resolves with the next good one
    up{job="foreshock",instance="i"} 1 1 0x5 1x5
    at 1 3 nothing, at 5 {job="foreshock", instance="i"}, at 8 nothing

ForeshockServiceDown fires when nothing scrapes the service at all
    up{job="other"} 1x9
    at 1 nothing, at 5 {job="foreshock"}

ForeshockServiceDown is silent while scrapes succeed
    up{job="foreshock"} 1x9
    at 9 nothing
"""
"""An alert and its story, the series by the minute, and what fires at some minutes."""

COUNTERS: list[tuple[str, str, Labels]] = [
    ("ForeshockNonFiniteSteps", 'foreshock_run_nonfinite_steps_total{run="a"}', RUN),
    (
        "ForeshockAgentDropping",
        'foreshock_agent_dropped_total{run="a",reason="spool_full"}',
        RUN | {"reason": "spool_full"},
    ),
    (
        "ForeshockAgentFault",
        'foreshock_agent_faults_total{run="a",component="collector"}',
        RUN | {"component": "collector"},
    ),
    ("ForeshockBatchesRefused", 'foreshock_service_batches_total{result="refused"}', {"result": "refused"}),
]
CASES = [
    *(Case.told(story) for story in STORIES.strip().split("\n\n")),
    *(case for counter in COUNTERS for case in counter_cases(*counter)),
]


def played(case: Case, series: dict[str, str], firing: dict[int, list[Labels]]) -> dict[str, Any]:
    """A test of promtool: these series, and what of the case's alert fires at some minutes."""
    return {
        "name": f"{case.alert} {case.story}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{case.alert}", alertstate="firing"}}',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": firing_series(case.alert, labels), "value": 1} for labels in expected],
            }
            for minute, expected in firing.items()
        ],
    }


def wrong(folder: Path, tests: list[tuple[Case, dict[str, Any]]]) -> str:
    """What promtool says of the tests that fail; empty where none does."""
    said = ""
    for name in dict.fromkeys(case.alert for case, _ in tests):
        result = promtool(folder, [test for case, test in tests if case.alert == name], only=name)
        said += "" if result.returncode == 0 else result.stdout + result.stderr
    return said


@pytest.mark.servers
def test_every_alert_fires_only_when_it_should(tmp_path: Path) -> None:
    assert wrong(tmp_path, [(case, played(case, case.series, case.firing)) for case in CASES]) == ""


def by_the_minute(values: str) -> list[str]:
    """Promtool's notation, one value for each minute."""
    found: list[str] = []
    for part in values.split():
        value, _, times = part.partition("x")
        if not times:
            found.append(part)
            continue
        match = re.fullmatch(r"(-?[\d.]+)([+-][\d.]+)", value)
        start, step = (match[1], float(match[2])) if match else (value, 0.0)
        found += [f"{float(start) + step * n:g}" if step else start for n in range(int(times) + 1)]
    return found


@pytest.mark.servers
@pytest.mark.promise("S25")
def test_no_alert_is_resolved_by_two_minutes_without_the_service(tmp_path: Path) -> None:
    """Every case that fires for something that the service says: two scrapes fail just after."""
    own = {alert.name for metric, alert in alerts() if metric is not None}
    fires = [case for case in CASES if case.alert in own and any(case.firing.values())]
    assert {case.alert for case in fires} == own
    tests = []
    for case in fires:
        minute, expected = next((minute, labels) for minute, labels in case.firing.items() if labels)
        told = " ".join(case.series)
        active = {f'foreshock_run_active{{run="{run}"}}': "1x120" for run in re.findall(r'run="([^"]*)"', told)}
        lost = {
            name: " ".join([*by_the_minute(values)[: minute + 1], "stale", "_"])
            for name, values in (active | case.series).items()
        }
        tests.append((case, played(case, lost, {minute + later: expected for later in (0, 1, 2)})))
    assert wrong(tmp_path, tests) == ""


@pytest.mark.servers
@pytest.mark.promise("S24")
def test_no_alert_of_a_run_fires_once_the_run_has_ended(tmp_path: Path) -> None:
    """Every case that fires for a run, of a run that has ended."""
    of_runs = [case for case in CASES if any("run" in labels for firing in case.firing.values() for labels in firing)]
    assert {case.alert for case in of_runs} == {a.name for metric, a in alerts() if metric and "run" in metric.labels}
    over = {f'foreshock_run_active{{run="{run}"}}': "0x120" for run in "abc"}
    tests = [(case, played(case, case.series | over, {minute: [] for minute in case.firing})) for case in of_runs]
    assert wrong(tmp_path, tests) == ""


@pytest.mark.servers
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(prometheus_rules(Links())))
    result = subprocess.run(["promtool", "check", "rules", "--lint-fatal", str(rules)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(list(alerts()))} rules found" in result.stdout
