"""Configuration files for Prometheus and Grafana, as text; Alertmanager's is made in alertmanager.py."""

from pathlib import Path
from typing import Any

from foreshock.dashboards.plain import to_yaml
from foreshock.dashboards.rules import DATASOURCE_UID, FOLDER, JOB, SCRAPE_INTERVAL_SECONDS


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


def _seconds(duration: str) -> float:
    """A Prometheus duration of one unit in seconds."""
    for suffix, factor in (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if duration.endswith(suffix) and duration.removesuffix(suffix).isdecimal():
            return int(duration.removesuffix(suffix)) * factor
    raise ValueError(f"{duration!r} is not a duration; write a whole number with ms, s, m or h, such as 15s")
