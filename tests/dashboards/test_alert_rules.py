"""Every alert fires, resolves and stays silent at the expected minutes, as promtool evaluates it."""

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
    """Series sampled every minute, and the labels of the alerts that fire at some of those minutes."""

    alert: str
    story: str
    series: dict[str, str]
    firing: dict[int, list[Labels]]

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parse one case of STORIES."""
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


def cases_of_counter(alert: str, series: str, labels: Labels) -> list[Case]:
    """The cases of a counter that should not grow."""
    return [
        Case(
            alert,
            "fires when the counter grows, resolves thirteen minutes later",
            {series: "0x3 4x30"},
            {3: [], 5: [labels], 30: []},
        ),
        Case(
            alert,
            "fires when the counter appears with a value above zero",
            {series: "_x4 4x30"},
            {3: [], 5: [labels], 30: []},
        ),
        Case(alert, "is silent while the counter is constant", {series: "7x40"}, {30: [], 40: []}),
        Case(
            alert, "is silent when the service restarts and counts from zero", {series: "7x20 0x20"}, {19: [], 22: []}
        ),
    ]


STORIES = Path(__file__).with_name("alert_stories.txt").read_text()
"""For each case: the alert and a title, the series by the minute, and the alerts firing at some minutes."""

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
    *(Case.parse(story) for story in STORIES.strip().split("\n\n")),
    *(case for counter in COUNTERS for case in cases_of_counter(*counter)),
]


def promtool_test(case: Case, series: dict[str, str], firing: dict[int, list[Labels]]) -> dict[str, Any]:
    """A promtool test: these series, and the firing instances of the case's alert at some minutes."""
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


def failures(folder: Path, tests: list[tuple[Case, dict[str, Any]]]) -> str:
    """promtool's output for the failing tests; empty if all pass."""
    output = ""
    for name in dict.fromkeys(case.alert for case, _ in tests):
        result = promtool(folder, [test for case, test in tests if case.alert == name], only=name)
        output += "" if result.returncode == 0 else result.stdout + result.stderr
    return output


@pytest.mark.servers
def test_alerts_fire_and_resolve_at_the_expected_minutes(tmp_path: Path) -> None:
    assert failures(tmp_path, [(case, promtool_test(case, case.series, case.firing)) for case in CASES]) == ""


def values_by_minute(values: str) -> list[str]:
    """Expand promtool's notation into one value per minute."""
    expanded: list[str] = []
    for part in values.split():
        value, _, times = part.partition("x")
        if not times:
            expanded.append(part)
            continue
        match = re.fullmatch(r"(-?[\d.]+)([+-][\d.]+)", value)
        start, step = (match[1], float(match[2])) if match else (value, 0.0)
        expanded += [f"{float(start) + step * n:g}" if step else start for n in range(int(times) + 1)]
    return expanded


@pytest.mark.servers
@pytest.mark.promise("S25")
def test_alerts_keep_firing_while_the_service_is_down_for_two_minutes(tmp_path: Path) -> None:
    """For every alert on a series of the service, two scrapes fail just after the alert fires."""
    from_service = {alert.name for metric, alert in alerts() if metric is not None}
    fires = [case for case in CASES if case.alert in from_service and any(case.firing.values())]
    assert {case.alert for case in fires} == from_service
    tests = []
    for case in fires:
        minute, expected = next((minute, labels) for minute, labels in case.firing.items() if labels)
        all_series = " ".join(case.series)
        active = {f'foreshock_run_active{{run="{run}"}}': "1x120" for run in re.findall(r'run="([^"]*)"', all_series)}
        with_gap = {
            name: " ".join([*values_by_minute(values)[: minute + 1], "stale", "_"])
            for name, values in (active | case.series).items()
        }
        tests.append((case, promtool_test(case, with_gap, {minute + later: expected for later in (0, 1, 2)})))
    assert failures(tmp_path, tests) == ""


@pytest.mark.servers
@pytest.mark.promise("S24")
def test_run_alerts_never_fire_for_an_ended_run(tmp_path: Path) -> None:
    """Every case that fires for a run, repeated for an ended run."""
    of_runs = [case for case in CASES if any("run" in labels for firing in case.firing.values() for labels in firing)]
    assert {case.alert for case in of_runs} == {a.name for metric, a in alerts() if metric and "run" in metric.labels}
    ended = {f'foreshock_run_active{{run="{run}"}}': "0x120" for run in "abc"}
    tests = [
        (case, promtool_test(case, case.series | ended, {minute: [] for minute in case.firing})) for case in of_runs
    ]
    assert failures(tmp_path, tests) == ""


@pytest.mark.servers
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(prometheus_rules(Links())))
    result = subprocess.run(["promtool", "check", "rules", "--lint-fatal", str(rules)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(list(alerts()))} rules found" in result.stdout
