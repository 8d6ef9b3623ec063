"""Loads the boards, and if asked the alert rules, into a Grafana that is not provisioned by file."""

from collections.abc import Iterator
from typing import Literal

from foreshock.dashboards.boards import boards
from foreshock.dashboards.grafana_client import GrafanaClient
from foreshock.dashboards.rules import (
    DATASOURCE_UID,
    FOLDER,
    GRAFANA_INTERVAL_SECONDS,
    GROUP,
    SCRAPE_INTERVAL_SECONDS,
    Links,
    grafana_rules,
)

AlertRules = Literal["leave", "push", "remove"]


def push(
    client: GrafanaClient,
    links: Links,
    *,
    prometheus_url: str | None = None,
    alert_rules: AlertRules = "leave",
) -> Iterator[str]:
    """Bring Grafana up to date; yields a sentence for each thing done. Repeating it changes nothing.

    With `prometheus_url` the data source is made too; without it the boards use the one with uid foreshock-prometheus,
    else the one that the reader picks. `alert_rules` is "leave" unless asked: where Prometheus evaluates the rules,
    pushing them as well would send every alert twice. Raises GrafanaError.
    """
    yield f"Grafana {client.version()} at {client.url}"
    client.upsert_folder(FOLDER, FOLDER)
    yield f"folder {FOLDER}"
    if prometheus_url is not None:
        changed = client.ensure_datasource(
            {
                "uid": DATASOURCE_UID,
                "name": "foreshock",
                "type": "prometheus",
                "access": "proxy",
                "url": prometheus_url,
                "jsonData": {"httpMethod": "POST", "timeInterval": f"{SCRAPE_INTERVAL_SECONDS}s"},
            }
        )
        yield f"data source {DATASOURCE_UID}" + ("" if changed else " is provisioned by file; left as it is")
    for board in boards(links).values():
        yield "board " + client.upsert_dashboard(board, FOLDER, "foreshock dashboards push")
    if alert_rules == "push":
        rules = grafana_rules(links)
        client.put_rule_group(FOLDER, GROUP, rules, GRAFANA_INTERVAL_SECONDS)
        yield f"{len(rules)} alert rules; evaluate them in Prometheus or here, not in both"
    elif alert_rules == "remove":
        removed = client.delete_rule_group(FOLDER, GROUP)
        yield "alert rules removed" if removed else "no alert rules to remove"
