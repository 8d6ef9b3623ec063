"""What every alert tells people, as promtool evaluates it and Alertmanager's own tool renders it."""

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
"""A title, the alert's name, the minute to look at it, and its series by the minute."""
WHOLE = '{{ template "foreshock.title" . }}\n\n{{ template "foreshock.message" . }}'


def _of(name: str, **labels: str) -> str:
    return name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items()) + "}"


_STEP: Final = {_of("foreshock_run_step", run=RUN): "9100x60", _of("foreshock_run_active", run=RUN): "1x60"}
WORDS: Final = BY_KEY["incident.words"].labels[2:]


def cases() -> Iterator[Case]:
    """Every alert that people are sent, each by its first story; the words of an incident are the service's."""
    first = dict[str, Case]()
    for case in reversed([case for case in CASES if any(case.firing.values())]):
        minute = next(minute for minute, labels in case.firing.items() if labels)
        series = {name.replace('run="a"', f'run="{RUN}"'): values for name, values in case.series.items()}
        first[case.alert] = (case.alert, case.alert, minute, series)
    words = words_of(RUN, example("rounding", "observe", 144))
    own = {"run": RUN, "cause": "rounding"}
    failing = {
        _of("foreshock_incident_words", **own, **dict(zip(WORDS, words, strict=True))): "1x9",
        _of("foreshock_incident_active", **own, state="open", act="none", severity="warning"): "1x9",
        _of("foreshock_incident_opened_step", **own): "9000x9",
    }
    yield SWITCHING, SWITCHING, 2, failing
    yield from (case for name, case in first.items() if name not in (SWITCHING, WATCHDOG.name))


def fired(every: Sequence[Case], folder: Path) -> list[Alert]:
    """The alert of each case as Prometheus sends it: promtool says what it got where nothing was expected."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in (_STEP | series).items()],
            "alert_rule_test": [{"alertname": name, "eval_time": f"{minute}m", "exp_alerts": []}],
        }
        for _, name, minute, series in every
    ]
    (folder / "rules.yml").write_text(yaml.safe_dump(prometheus_rules(LINKS)))
    asked = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "test.yml").write_text(yaml.safe_dump(asked))
    done = subprocess.run(["promtool", "test", "rules", str(folder / "test.yml")], capture_output=True, text=True)
    said = done.stdout + done.stderr
    found: list[Alert] = [
        {"status": "firing", "labels": _pairs(labels), "annotations": _pairs(annotations)}
        for labels, annotations in re.findall(r"^\s+Labels:\{(.*)\}\n\s+Annotations:\{(.*)\}$", said, re.MULTILINE)
    ]
    if [one["labels"]["alertname"] for one in found] != [name for _, name, _, _ in every]:
        raise ValueError(f"not every case is one alert that fires: {said}")
    return found


def _pairs(text: str) -> dict[str, str]:
    return {name: json.loads(value) for name, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', text)}


def rendered(alerts: Sequence[Alert], folder: Path) -> str:
    """Title and message of alerts that Alertmanager sends together."""
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
    """Every message by its title. Raises ValueError where an alert does not fire."""
    every = list(cases())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = fired(every, folder)
        by_name = {one["labels"]["alertname"]: one for one in found}
        failing, silent = found[0], by_name["ForeshockRunUnreachable"]
        many = [json.loads(json.dumps(silent).replace(RUN, f"sweep/{number:03}")) for number in range(200)]
        layers = [
            json.loads(json.dumps(by_name["ForeshockNonFiniteRows"]).replace("layer 3", f"layer {layer}"))
            for layer in range(12)
        ]
        every_one = [(title, [one]) for (title, *_), one in zip(every, found, strict=True)]
        every_one += [
            (f"{SWITCHING}: over", [failing | {"status": "resolved"}]),
            ("Two alerts of a run", [failing, by_name["ForeshockLossJumped"]]),
            ("Twelve layers that are not finite", layers),
            ("200 runs that fall silent together", many),
            ("200 runs that are back together", [one | {"status": "resolved"} for one in many]),
        ]
        return {title: rendered(alerts, folder).strip() for title, alerts in every_one}


def test_every_alert_fires_and_its_message_is_short_has_no_hole_and_asks_for_something_only_while_it_fires() -> None:
    written = messages()
    named = {title.split(":")[0] for title in written}
    assert {alert.name for _, alert in alerts()} - {"ForeshockWatchdog"} <= named
    for title, message in written.items():
        assert 0 < len(message) < 1500, title
        for hole in ("<no value>", "NaN", "unknown", "{{", "%!"):
            assert hole not in message.replace("NaN or infinite", ""), title
        assert not re.search(r"\b1 (applied switches|commands)\b", message), title
        asked = 0 if message.startswith(("Resolved", "No longer alerting")) else max(1, title.startswith("Two") * 2)
        assert message.count("To do: ") == asked, title
    first = written[SWITCHING].splitlines()
    assert first[0].startswith(
        f"Warning: Run {RUN}: attention becomes unstable in 144 heads of layers 0 to 11 (rounding)"
    )
    assert [line.split(" ")[0] for line in first[-6:]] == ["Done:", "To", "Since", "Evidence", "Dashboard:", "Runbook:"]
    assert "Since 2026-11-21 03:04 UTC." in first
    assert written["Two alerts of a run"].startswith("Critical: 2 alerts")
    over = written[f"{SWITCHING}: over"]
    assert over.startswith("No longer alerting: ")
    assert "Either its warnings are over or the run has ended, since 2026-11-21" in over
