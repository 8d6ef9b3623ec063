"""What every alert tells people, as promtool evaluates it and amtool renders it."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import yaml
from tests.dashboards.shipped import TEMPLATES
from tests.server.incident_examples import example

from foreshock.contract.causes import CAUSES, IncidentCause, curable
from foreshock.contract.incident import SwitchOutcome
from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.wire import Policy
from foreshock.dashboards.rules import Links, prometheus_rules
from foreshock.server.notifier import words_of

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


def _incident(cause: IncidentCause, act: str, state: str, heads: int) -> dict[str, str]:
    critical = cause == "not finite" or state == "not arrested"
    of = {"run": RUN, "cause": cause}
    known: dict[str, Any] = {}
    if state != "open":
        known["modes"] = {((4 + n // 12) % 12, (2 + n) % 12): "row_corrected" for n in range(heads)}
    if state == "not arrested":
        known["judged"] = [SwitchOutcome(None, 9000, arrested=False)]
    policies: dict[str, Policy] = {"none": "observe", "propose": "approve", "switch": "auto"}
    words = words_of(RUN, example(cause, policies[act], heads, **known))
    severity = "critical" if critical else "warning"
    place = {"layer": "4", "head": "2"} if heads else {"layer": "", "head": ""}
    forecast = heads and cause != "not finite"
    foreseen = {
        _of("foreshock_warning_forecast_steps", run=RUN, **place): "2600x9",
    }
    return (foreseen if forecast else {}) | {
        _of("foreshock_incident_words", **of, **dict(zip(WORDS, words, strict=True))): "1x9",
        _of("foreshock_incident_active", **of, state=state, act=act, severity=severity): "1x9",
        _of("foreshock_incident_opened_step", **of): "9000x9",
        _of("foreshock_warning_active", **of, **place, signal="offset", severity=severity): "1x9",
    }


def cases() -> Iterator[Case]:
    """Every alert that people are sent, and the one about incidents for each cause, policy and state."""
    failing = "ForeshockHeadFailing"
    for cause in CAUSES:
        acts = {"observe": "none", "approve": "propose", "auto": "switch"} if curable(cause) else {"any": "none"}
        for (policy, act), (number, heads) in product(acts.items(), {"one head": 1, "144 heads": 144}.items()):
            named = "any policy" if policy == "any" else f"policy {policy}"
            title = f"{failing}: {cause}, {named}, {number}"
            yield title, failing, 2, _incident(cause, act, "open", heads)
    whole_run: tuple[IncidentCause, ...] = ("not finite", "other")
    for cause in whole_run:
        yield f"{failing}: {cause}, any policy, the whole run", failing, 2, _incident(cause, "none", "open", 0)
    for state in ("switched", "not arrested"):
        yield f"{failing}: rounding, {state}", failing, 2, _incident("rounding", "switch", state, 144)
    active, heard = _of("foreshock_run_active", run=RUN), _of("foreshock_run_last_heard_timestamp_seconds", run=RUN)
    stepped, pace = (_of(f"foreshock_run_{x}_seconds", run=RUN) for x in ("last_step_timestamp", "step_time"))
    pending, loss = _of("foreshock_service_commands_pending", run=RUN), _of("foreshock_run_loss", run=RUN)
    other: dict[str, tuple[int, dict[str, str]]] = {
        "ForeshockSwitchNotArrested": (2, {_of("foreshock_switch_not_arrested", run=RUN): "1x9"}),
        "ForeshockNonFiniteRows": (
            2,
            {
                _of("foreshock_layer_nonfinite_rows", run=RUN, layer="3"): "12x9",
                _of("foreshock_head_nonfinite_rows", run=RUN, layer="3", head="5"): "12x9",
            },
        ),
        "ForeshockNonFiniteSteps": (5, {_of("foreshock_run_nonfinite_steps_total", run=RUN): "0x3 4x9"}),
        "ForeshockLossNotFinite": (2, {loss: "NaN NaN NaN NaN"}),
        "ForeshockLossJumped": (36, {loss: "1.0x30 3.1x20"}),
        "ForeshockRunHung": (12, {heard: "0+60x30", stepped: "0x30", pace: "0.5x30", active: "1x30"}),
        "ForeshockRunUnreachable": (12, {heard: "0x30", active: "1x30"}),
        "ForeshockCommandUnanswered": (8, {pending: "1x20", active: "1x20"}),
        "ForeshockAgentDropping": (5, {_of("foreshock_agent_dropped_total", run=RUN, reason="spool_full"): "0x3 40x9"}),
        "ForeshockAgentFault": (5, {_of("foreshock_agent_faults_total", run=RUN, component="collector"): "0x3 2x9"}),
        "ForeshockBatchesRefused": (5, {_of("foreshock_service_batches_total", result="refused"): "0x3 7x9"}),
        "ForeshockAlertPathBroken": (12, {"foreshock_service_watchdog_timestamp_seconds": "60x20"}),
        "ForeshockSeriesDropped": (15, {"foreshock_service_series_dropped": "500x20"}),
        "ForeshockServiceDown": (5, {_of("up", job="foreshock", instance="10.0.0.7:8765"): "0x9"}),
    }
    for name, (minute, series) in other.items():
        yield name, name, minute, series


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
        failing, silent = found[1], by_name["ForeshockRunUnreachable"]
        many = [json.loads(json.dumps(silent).replace(RUN, f"sweep/{number:03}")) for number in range(200)]
        layers = [
            json.loads(json.dumps(by_name["ForeshockNonFiniteRows"]).replace("layer 3", f"layer {layer}"))
            for layer in range(12)
        ]
        every_one = [(title, [one]) for (title, *_), one in zip(every, found, strict=True)]
        every_one += [
            ("ForeshockHeadFailing: over", [failing | {"status": "resolved"}]),
            ("Two alerts of a run", [failing, by_name["ForeshockLossJumped"]]),
            ("Twelve layers that are not finite", layers),
            ("200 runs that fall silent together", many),
            ("200 runs that are back together", [one | {"status": "resolved"} for one in many]),
        ]
        return {title: rendered(alerts, folder).strip() for title, alerts in every_one}
