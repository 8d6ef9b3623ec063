"""The message of every alert, as promtool evaluates it and amtool renders it."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from tests.dashboards.shipped import SWITCHING, TEMPLATES
from tests.dashboards.test_alert_rules import CASES
from tests.server.incident_examples import example

from foreshock.contract.metrics.catalog import BY_KEY, WATCHDOG
from foreshock.dashboards.rules import Links, alerts, prometheus_rules
from foreshock.server.notifier import words_of

pytestmark = pytest.mark.servers

LINKS: Final = Links(
    grafana="https://grafana.example.org",
    service="https://foreshock.example.org",
    runbooks="https://docs.example.org/runbooks",
)
RUN: Final = "gpt2-small/7"
Alert = dict[str, Any]
Case = tuple[str, str, int, dict[str, str]]
"""A title, the alert's name, the minute of evaluation, and its series by the minute."""
WHOLE = '{{ template "foreshock.title" . }}\n\n{{ template "foreshock.message" . }}'


def _series(name: str, **labels: str) -> str:
    return name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items()) + "}"


_STEP: Final = {_series("foreshock_run_step", run=RUN): "9100x60", _series("foreshock_run_active", run=RUN): "1x60"}
WORDS: Final = BY_KEY["incident.words"].labels[2:]


def cases() -> Iterator[Case]:
    """The first case of every alert that is sent to people; the service writes the text of an incident."""
    first = dict[str, Case]()
    for case in reversed([case for case in CASES if any(case.firing.values())]):
        minute = next(minute for minute, labels in case.firing.items() if labels)
        series = {name.replace('run="a"', f'run="{RUN}"'): values for name, values in case.series.items()}
        first[case.alert] = (case.alert, case.alert, minute, series)
    words = words_of(RUN, example("rounding", "observe", 144))
    labels_of_run = {"run": RUN, "cause": "rounding"}
    failing = {
        _series("foreshock_incident_words", **labels_of_run, **dict(zip(WORDS, words, strict=True))): "1x9",
        _series("foreshock_incident_active", **labels_of_run, state="open", act="none", severity="warning"): "1x9",
        _series("foreshock_incident_opened_step", **labels_of_run): "9000x9",
    }
    yield SWITCHING, SWITCHING, 2, failing
    yield from (case for name, case in first.items() if name not in (SWITCHING, WATCHDOG.name))


def firing_alerts(all_cases: Sequence[Case], folder: Path) -> list[Alert]:
    """The alert of each case as Prometheus sends it. The tests expect no alert, so promtool prints the ones it got."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in (_STEP | series).items()],
            "alert_rule_test": [{"alertname": name, "eval_time": f"{minute}m", "exp_alerts": []}],
        }
        for _, name, minute, series in all_cases
    ]
    (folder / "rules.yml").write_text(yaml.safe_dump(prometheus_rules(LINKS)))
    test_file = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "test.yml").write_text(yaml.safe_dump(test_file))
    done = subprocess.run(["promtool", "test", "rules", str(folder / "test.yml")], capture_output=True, text=True)
    output = done.stdout + done.stderr
    found: list[Alert] = [
        {"status": "firing", "labels": _pairs(labels), "annotations": _pairs(annotations)}
        for labels, annotations in re.findall(r"^\s+Labels:\{(.*)\}\n\s+Annotations:\{(.*)\}$", output, re.MULTILINE)
    ]
    if [one["labels"]["alertname"] for one in found] != [name for _, name, _, _ in all_cases]:
        raise ValueError(f"not every case is one alert that fires: {output}")
    return found


def _pairs(text: str) -> dict[str, str]:
    return {name: json.loads(value) for name, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', text)}


def rendered(alerts: Sequence[Alert], folder: Path) -> str:
    """Title and message of a group of alerts."""
    at = {"startsAt": "2026-11-21T03:04:00Z", "endsAt": "2026-11-21T04:10:00Z"}
    common = {
        kind: dict(set.intersection(*(set(one[kind].items()) for one in alerts))) for kind in ("labels", "annotations")
    }
    data = {
        "status": alerts[0]["status"],
        "alerts": [one | at for one in alerts],
        "commonLabels": common["labels"],
        "commonAnnotations": common["annotations"],
    }
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "messages.tmpl").write_text(TEMPLATES.read_text())
    files = [f"--template.glob={folder}/messages.tmpl", f"--template.data={folder}/data.json"]
    command = [
        "amtool",
        "template",
        "render",
        *files,
        f"--template.text={WHOLE}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def messages() -> dict[str, str]:
    """Every message by its title. Raises ValueError if an alert does not fire."""
    all_cases = list(cases())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = firing_alerts(all_cases, folder)
        by_name = {one["labels"]["alertname"]: one for one in found}
        failing, silent = found[0], by_name["ForeshockRunUnreachable"]
        silent_runs = [json.loads(json.dumps(silent).replace(RUN, f"sweep/{number:03}")) for number in range(200)]
        layers = [
            json.loads(json.dumps(by_name["ForeshockNonFiniteRows"]).replace("layer 3", f"layer {layer}"))
            for layer in range(12)
        ]
        groups = [(title, [one]) for (title, *_), one in zip(all_cases, found, strict=True)]
        groups += [
            (f"{SWITCHING}: over", [failing | {"status": "resolved"}]),
            ("Two alerts of a run", [failing, by_name["ForeshockLossJumped"]]),
            ("Twelve layers that are not finite", layers),
            ("200 runs that fall silent together", silent_runs),
            ("200 runs that are back together", [one | {"status": "resolved"} for one in silent_runs]),
        ]
        return {title: rendered(alerts, folder).strip() for title, alerts in groups}


def test_messages_are_short_and_complete_and_request_action_only_while_firing() -> None:
    texts = messages()
    alert_names = {title.split(":")[0] for title in texts}
    assert {alert.name for _, alert in alerts()} - {"ForeshockWatchdog"} <= alert_names
    for title, message in texts.items():
        assert 0 < len(message) < 1500, title
        for hole in ("<no value>", "NaN", "unknown", "{{", "%!"):
            assert hole not in message.replace("NaN or infinite", ""), title
        assert not re.search(r"\b1 (applied switches|commands)\b", message), title
        expected_actions = (
            0 if message.startswith(("Resolved", "No longer alerting")) else max(1, title.startswith("Two") * 2)
        )
        assert message.count("To do: ") == expected_actions, title
    first = texts[SWITCHING].splitlines()
    assert first[0].startswith(
        f"Warning: Run {RUN}: attention becomes unstable in 144 heads of layers 0 to 11 (rounding)"
    )
    assert [line.split(" ")[0] for line in first[-6:]] == ["Done:", "To", "Since", "Evidence", "Dashboard:", "Runbook:"]
    assert "Since 2026-11-21 03:04 UTC." in first
    assert texts["Two alerts of a run"].startswith("Critical: 2 alerts")
    resolved = texts[f"{SWITCHING}: over"]
    assert resolved.startswith("No longer alerting: ")
    assert "Either its warnings are over or the run has ended, since 2026-11-21" in resolved
