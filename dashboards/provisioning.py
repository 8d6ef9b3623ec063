"""Configuration files for Prometheus, Alertmanager and Grafana, as text."""

from pathlib import Path
from typing import Any

import yaml

from foreshock.contract.catalog import WATCHDOG
from foreshock.dashboards.messages import MESSAGE, TEMPLATES, TITLE
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


def to_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML, keys in the order given."""
    return yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)


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


def alertmanager_config(
    webhook_url: str,
    token_file: Path | None,
    *,
    templates: Path | None = None,
    slack_url_file: Path | None = None,
    group_wait: str = "5s",
    group_interval: str = "1m",
    repeat_interval: str = "4h",
    watchdog_interval: str = "30s",
) -> str:
    """An Alertmanager configuration that sends everything to the service's webhook.

    The service keeps the audit trail, acts under its policy and notifies people. `token_file` holds the bearer token.
    `templates` is the file of messages.TEMPLATES; with `slack_url_file` as well, people get them, the watchdog aside.
    The watchdog has a route of its own, since its silence is the alert; it repeats after one to two times
    `watchdog_interval`.
    """

    def receiver(name: str) -> dict[str, Any]:
        webhook: dict[str, Any] = {"url": webhook_url, "send_resolved": True}
        if token_file is not None:
            webhook["http_config"] = {"authorization": {"type": "Bearer", "credentials_file": str(token_file)}}
        return {"name": name, "webhook_configs": [webhook]}

    people = receiver("foreshock")
    if slack_url_file is not None:
        people["slack_configs"] = [
            {"api_url_file": str(slack_url_file), "title": TITLE, "text": MESSAGE, "send_resolved": True}
        ]
    return to_yaml(
        {
            **({} if templates is None else {"templates": [str(templates)]}),
            "route": {
                "receiver": "foreshock",
                "group_by": ["alertname", "run"],
                "group_wait": group_wait,
                "group_interval": group_interval,
                "repeat_interval": repeat_interval,
                "routes": [
                    {
                        "receiver": "watchdog",
                        "matchers": [f'alertname="{WATCHDOG.name}"'],
                        "group_wait": "0s",
                        "group_interval": watchdog_interval,
                        "repeat_interval": watchdog_interval,
                    }
                ],
            },
            "receivers": [people, receiver("watchdog")],
        }
    )


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
                        }
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
