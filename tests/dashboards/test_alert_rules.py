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


STORIES = Path(__file__).with_name("alert_stories.txt").read_text()
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
