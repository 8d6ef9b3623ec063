"""Series on which alerts fire, and promtool, which evaluates the rules on them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from foreshock.contract.metrics.catalog import METRICS
from foreshock.dashboards.rules import Links, alerts, prometheus_rules

Labels = dict[str, str]
RUN: Labels = {"run": "a"}
WARNED = {"run": "a", "cause": "rounding"}


def warned(severity: str, **changes: str) -> str:
    """The series of one incident."""
    labels = WARNED | {"state": "open", "act": "none"} | changes | {"severity": severity}
    return "foreshock_incident_active{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def promtool(folder: Path, tests: list[dict[str, Any]], *, only: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool's unit tests with the rules of the catalogue, or only with the rule of one alert, which is faster.

    A run is active unless its series say otherwise.
    """
    for test in tests:
        all_series = " ".join(series["series"] for series in test["input_series"])
        for run in dict.fromkeys(re.findall(r'run="([^"]*)"', all_series)):
            if (active := f'foreshock_run_active{{run="{run}"}}') not in all_series:
                test["input_series"].append({"series": active, "values": "1x120"})
    rules = prometheus_rules(Links())
    [group] = rules["groups"]
    group["rules"] = [rule for rule in group["rules"] if only in ("", rule["alert"])]
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    (folder / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}, sort_keys=False)
    )
    return subprocess.run(["promtool", "test", "rules", str(folder / "test.yml")], capture_output=True, text=True)


def firing_series(alert: str, labels: Labels) -> str:
    """The series by which Prometheus records a firing alert."""
    pairs = {"alertname": alert, "alertstate": "firing", "severity": severity_of(alert)} | labels
    return "ALERTS{" + ",".join(f'{name}="{value}"' for name, value in pairs.items() if value) + "}"


def severity_of(alert: str) -> str:
    """The severity label that the rule adds; empty if the series has its own."""
    own_severity = {a.name for m in METRICS for a in m.alerts if "severity" in m.labels}
    return "" if alert in own_severity else next(a.severity for _, a in alerts() if a.name == alert)
