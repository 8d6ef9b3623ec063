"""A real Prometheus scrapes a real service and writes into a real VictoriaMetrics: series that outgrow one machine."""

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
def long_term(start: Start, service: Server, tmp_path: Path) -> Server:
    """A VictoriaMetrics, into which a Prometheus writes what it scrapes of the service."""
    port = free_port()
    victoria = start(
        [
            "victoria-metrics",
            f"-httpListenAddr=127.0.0.1:{port}",
            f"-storageDataPath={tmp_path / 'victoria'}",
            "-search.latencyOffset=0s",  # a query sees what was written a moment ago
            "-search.disableCache",
        ],
        port,
        "/health",
    )
    write = f"{victoria.url}/api/v1/write"
    remote = prometheus_config(service.address, RULES, "127.0.0.1:9", scrape_interval="1s", remote_write_url=write)
    prometheus(start, tmp_path, remote)
    return victoria


def value(store: Server, query: str) -> float | None:
    """What the long-term store answers now; None when the series is not there, or stale."""
    answer = httpx.get(f"{store.url}/api/v1/query", params={"query": query}, timeout=10).raise_for_status().json()
    found = answer["data"]["result"]
    return float(found[0]["value"][1]) if found else None


@pytest.mark.full
@pytest.mark.servers
@pytest.mark.promise("S6")
def test_series_reach_the_long_term_store_end_with_their_run_and_stay_within_the_budget(
    service: Server, long_term: Server, record_property: Any
) -> None:
    loss, dropped = BY_KEY["run.loss"].name, BY_KEY["service.series_dropped"].name
    rank = FakeRank(run="remote")
    send(service, rank, rank.started(), rank.sample(1, loss=2.5))
    eventually("the loss is in the long-term store", lambda: value(long_term, f'{loss}{{run="remote"}}') == 2.5)
    assert value(long_term, dropped) == 0

    send(service, rank, Finished(step=1, unix_seconds=1.0, status="completed"))
    # within two minutes: long before the five minutes that a vanished series is looked back for
    eventually("the run's series are stale", lambda: value(long_term, f'{loss}{{run="remote"}}') is None)
    assert value(long_term, f'last_over_time({loss}{{run="remote"}}[10m])') == 2.5

    for number in range(12):
        wide = FakeRank(run=f"wide-{number}", layers=8)
        send(service, wide, wide.started(), wide.sample(1))
    eventually("dropped series are counted", lambda: (value(long_term, dropped) or 0) > 0)
    scraped = value(long_term, 'scrape_samples_scraped{job="foreshock"}')
    record_property("series scraped", int(scraped or 0))
    record_property("series dropped", int(value(long_term, dropped) or 0))
    assert scraped is not None
    assert MAX_SERIES * 0.9 < scraped <= MAX_SERIES + 1
