"""Configuration files for Prometheus and Grafana, as text; Alertmanager's is made in alertmanager.py."""

from pathlib import Path
from typing import Any

from foreshock.contract.catalog import WATCHDOG
from foreshock.dashboards.alertmanager import FLEET_ALERTS, FLEET_INTERVAL, FLEET_WAIT
from foreshock.dashboards.messages import TEMPLATES
from foreshock.dashboards.plain import to_yaml
from foreshock.dashboards.rules import (
    DATASOURCE_UID,
    FOLDER,
    GRAFANA_INTERVAL_SECONDS,
    GROUP,
    JOB,
    SCRAPE_INTERVAL_SECONDS,
    Links,
    grafana_rules,
)


def prometheus_config(
    target: str,
    rules: Path,
    alertmanager: str,
    *,
    scrape_interval: str = f"{SCRAPE_INTERVAL_SECONDS}s",
    evaluation_interval: str = "15s",
    token_file: Path | None = None,
    remote_write_url: str | None = None,
) -> str:
    """A Prometheus configuration that scrapes one service, evaluates `rules` and sends alerts to one Alertmanager.

    `target` and `alertmanager` are host:port. `token_file` holds the bearer token of the service's /metrics.
    """
    scrape: dict[str, Any] = {"job_name": JOB, "static_configs": [{"targets": [target]}]}
    if token_file is not None:
        scrape["authorization"] = {"type": "Bearer", "credentials_file": str(token_file)}
    config: dict[str, Any] = {
        "global": {
            "scrape_interval": scrape_interval,
            # Prometheus refuses a timeout longer than the interval; its default is 10s.
            "scrape_timeout": scrape_interval if _seconds(scrape_interval) < 10 else "10s",
            "evaluation_interval": evaluation_interval,
        },
        "rule_files": [str(rules)],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [scrape],
    }
    if remote_write_url is not None:
        config["remote_write"] = [{"url": remote_write_url}]
    return to_yaml(config)


def datasource_config(prometheus_url: str) -> str:
    """Grafana's provisioning file for the Prometheus data source."""
    return to_yaml(
        {
            "apiVersion": 1,
            "datasources": [
                {
                    "name": "foreshock",
                    "uid": DATASOURCE_UID,
                    "type": "prometheus",
                    "access": "proxy",
                    "url": prometheus_url,
                    "isDefault": True,
                    "editable": False,
                    # $__rate_interval is four of these; it must be the interval that Prometheus scrapes with.
                    "jsonData": {"httpMethod": "POST", "timeInterval": f"{SCRAPE_INTERVAL_SECONDS}s"},
                }
            ],
        }
    )


def boards_config(folder: Path) -> str:
    """Grafana's provisioning file that loads the boards from a folder of its own file system."""
    return to_yaml(
        {
            "apiVersion": 1,
            "providers": [
                {
                    "name": "foreshock",
                    "folder": FOLDER,
                    "type": "file",
                    "disableDeletion": True,
                    "allowUiUpdates": False,
                    "options": {"path": str(folder)},
                }
            ],
        }
    )


def grafana_alerting_config(links: Links, webhook_url: str, secret_file: Path) -> str:
    """Grafana's provisioning file for the rules, a signed webhook to the service and the route to it.

    For installations without Alertmanager: load either this or the Prometheus rules, never both. The `policies` part
    replaces the whole tree of notification policies of the organisation.
    """
    receiver = {
        "uid": "foreshock-webhook",
        "type": "webhook",
        "settings": {
            "url": webhook_url,
            "httpMethod": "POST",
            "hmacConfig": {
                "secret": f"$__file{{{secret_file}}}",
                "header": "X-Grafana-Alerting-Signature",
                "timestampHeader": "X-Grafana-Alerting-Signature-Timestamp",
            },
        },
    }
    return to_yaml(
        {
            "apiVersion": 1,
            "groups": [
                {
                    "orgId": 1,
                    "name": GROUP,
                    "folder": FOLDER,
                    "interval": f"{GRAFANA_INTERVAL_SECONDS}s",
                    "rules": grafana_rules(links),
                }
            ],
            "templates": [{"orgId": 1, "name": "foreshock", "template": TEMPLATES}],
            "contactPoints": [{"orgId": 1, "name": "foreshock", "receivers": [receiver]}],
            "policies": [
                {
                    "orgId": 1,
                    "receiver": "foreshock",
                    "group_by": ["alertname", "run"],
                    "group_wait": "5s",
                    "group_interval": "1m",
                    "repeat_interval": "4h",
                    "routes": [
                        {
                            "receiver": "foreshock",
                            "object_matchers": [["alertname", "=", WATCHDOG.name]],
                            "group_wait": "0s",
                            "group_interval": "30s",
                            "repeat_interval": "30s",
                        },
                        {
                            "receiver": "foreshock",
                            "object_matchers": [["alertname", "=~", "|".join(FLEET_ALERTS)]],
                            "group_by": ["alertname"],
                            "group_wait": FLEET_WAIT,
                            "group_interval": FLEET_INTERVAL,
                        },
                    ],
                }
            ],
        }
    )


def _seconds(duration: str) -> float:
    """A Prometheus duration of one unit in seconds."""
    for suffix, factor in (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if duration.endswith(suffix) and duration.removesuffix(suffix).isdecimal():
            return int(duration.removesuffix(suffix)) * factor
    raise ValueError(f"{duration!r} is not a duration; write a whole number with ms, s, m or h, such as 15s")
