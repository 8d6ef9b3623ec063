"""A real Prometheus scrapes a real service and writes to a real VictoriaMetrics (remote write)."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.dashboards.shipped import prometheus_config
from tests.e2e.running import Server, Start, eventually, free_port, prometheus

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank, post

RULES = Path(__file__).parents[2] / "src/foreshock/dashboards" / "generated" / "prometheus-rules.yml"
FINISHED_SECONDS = 4.0
MAX_SERIES = 400


def send(service: Server, rank: FakeRank, *events: Any) -> None:
    with httpx.Client(base_url=service.url) as client:
        post(client, rank.batch(*events)).raise_for_status()


@pytest.fixture
def service(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("FORESHOCK_MAX_SERIES", str(MAX_SERIES))
    port = free_port()
    monkeypatch.setenv("FORESHOCK_PORT", str(port))
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", f"sqlite:///{tmp_path}/foreshock.db")
    constants = json.dumps({"finished_run_seconds": FINISHED_SECONDS})
    return start([sys.executable, "-P", "-m", "foreshock.server.testing", constants], port, "/readyz")


@pytest.fixture
def victoria_metrics(start: Start, service: Server, tmp_path: Path) -> Server:
    """A VictoriaMetrics to which a Prometheus writes the scraped series of the service."""
    port = free_port()
    victoria = start(
        [
            "victoria-metrics",
            f"-httpListenAddr=127.0.0.1:{port}",
            f"-storageDataPath={tmp_path / 'victoria'}",
            "-search.latencyOffset=0s",  # queries see the newest samples
            "-search.disableCache",
        ],
        port,
        "/health",
    )
    write = f"{victoria.url}/api/v1/write"
    config = prometheus_config(service.address, RULES, "127.0.0.1:9", scrape_interval="1s", remote_write_url=write)
    prometheus(start, tmp_path, config)
    return victoria


def value(store: Server, query: str) -> float | None:
    """The current value in the long-term store; None if the series is missing or stale."""
    answer = httpx.get(f"{store.url}/api/v1/query", params={"query": query}, timeout=10).raise_for_status().json()
    result = answer["data"]["result"]
    return float(result[0]["value"][1]) if result else None


@pytest.mark.full
@pytest.mark.servers
@pytest.mark.promise("S6")
def test_series_are_stored_remotely_end_with_their_run_and_stay_within_budget(
    service: Server, victoria_metrics: Server, record_property: Any
) -> None:
    loss, dropped = BY_KEY["run.loss"].name, BY_KEY["service.series_dropped"].name
    rank = FakeRank(run="remote")
    send(service, rank, rank.started(), rank.sample(1, loss=2.5))
    eventually("the loss is in the long-term store", lambda: value(victoria_metrics, f'{loss}{{run="remote"}}') == 2.5)
    assert value(victoria_metrics, dropped) == 0

    send(service, rank, Finished(step=1, unix_seconds=1.0, status="completed"))
    # stale markers end the series well before Prometheus' lookback of five minutes
    eventually("the run's series are stale", lambda: value(victoria_metrics, f'{loss}{{run="remote"}}') is None)
    assert value(victoria_metrics, f'last_over_time({loss}{{run="remote"}}[10m])') == 2.5

    for number in range(12):
        wide = FakeRank(run=f"wide-{number}", layers=8)
        send(service, wide, wide.started(), wide.sample(1))
    eventually("dropped series are counted", lambda: (value(victoria_metrics, dropped) or 0) > 0)
    scraped = value(victoria_metrics, 'scrape_samples_scraped{job="foreshock"}')
    record_property("series scraped", int(scraped or 0))
    record_property("series dropped", int(value(victoria_metrics, dropped) or 0))
    assert scraped is not None
    assert MAX_SERIES * 0.9 < scraped <= MAX_SERIES + 1
