"""Loads the boards into a Grafana that is not provisioned by file."""

from collections.abc import Iterator

from foreshock.dashboards.boards import boards
from foreshock.dashboards.grafana_client import GrafanaClient
from foreshock.dashboards.rules import DATASOURCE_UID, FOLDER, SCRAPE_INTERVAL_SECONDS, Links


def push(client: GrafanaClient, links: Links, *, prometheus_url: str | None = None) -> Iterator[str]:
    """Bring Grafana up to date; yields a sentence for each thing done. Repeating it changes nothing.

    With `prometheus_url` the data source is made too; without it the boards use the one with uid foreshock-prometheus,
    else the one that the reader picks. Raises GrafanaError.
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
