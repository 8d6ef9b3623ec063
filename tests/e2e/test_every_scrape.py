"""Every query of every board has data at each scrape from its first data on, while a real agent trains.

The agents have their default settings, one of them with QK-Clip. Prometheus scrapes the real service twice a second in
place of four times a minute, so that one minute holds as many scrapes as half an hour.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.dashboards.promql import concrete, queries
from tests.dashboards.shipped import prometheus_config
from tests.e2e.running import Start, prometheus

from foreshock.server.testing import LiveService

ROOT = Path(__file__).parents[2]
SCRAPE_SECONDS = 0.5
SCRAPES = 120
RULES = ROOT / "src/foreshock/dashboards" / "generated" / "prometheus-rules.yml"

TRAIN = """
import sys, time, torch
from torch.nn import functional as F
from foreshock.monitor import attach
sys.path.insert(0, sys.argv[3])
from plain_loop import Model
torch.manual_seed(0)
torch.set_num_threads(1)
model, clips = Model(), sys.argv[2]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
settings = {"qk_clip": "always", "qk_clip_threshold": 0.01} if clips == "clips" else {}
with attach(model, run=clips, url=sys.argv[1], **settings) as agent:
    while True:
        tokens = torch.randint(256, (4, 33))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        agent.step(loss, grad_norm=norm, learning_rate=1e-3)
        time.sleep(0.05)
"""

NOTHING_TO_SHOW = {
    "foreshock_incident_": "healthy runs have no incidents",
    "foreshock_warning_": "healthy runs raise no warnings",
    "foreshock_switch_": "no head is switched",
    "ALERTS": "no alert fires",
    "foreshock_service_webhooks": "no Alertmanager calls",
    "foreshock_service_watchdog": "no Alertmanager calls",
}
"""Beginnings of the metrics of which two healthy runs have none, and why."""


@pytest.fixture
def scraped(start: Start, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that has scraped the service of two trainings SCRAPES times."""
    with LiveService(tmp_path) as service:
        target = service.url.removeprefix("http://")
        config = prometheus_config(target, RULES, "127.0.0.1:9", scrape_interval="500ms", evaluation_interval="500ms")
        scraper = prometheus(start, tmp_path, config)
        examples = str(ROOT / "examples")
        running = {}
        for run in ("plain", "clips"):
            with (tmp_path / f"{run}.log").open("wb") as log:
                command = [sys.executable, "-P", "-c", TRAIN, service.url, run, examples]
                running[run] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            time.sleep(SCRAPES * SCRAPE_SECONDS)
            for run, process in running.items():
                assert process.poll() is None, (tmp_path / f"{run}.log").read_text()[-2000:]
            yield scraper.url
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def moments(address: str, expr: str, end: float) -> set[float]:
    """At which evaluations, one for each scrape, a query had data."""
    query = {"query": f"count({expr})", "start": end - SCRAPES * SCRAPE_SECONDS, "end": end, "step": SCRAPE_SECONDS}
    answer = httpx.post(f"{address}/api/v1/query_range", data=query, timeout=30).json()
    assert answer["status"] == "success", answer
    return {float(moment) for series in answer["data"]["result"] for moment, _ in series["values"]}


@pytest.mark.full
@pytest.mark.servers
@pytest.mark.promise("S25")
@pytest.mark.timeout(600)
def test_each_query_has_data_at_every_scrape_once_it_has_had_any(scraped: str) -> None:
    end = time.time() - 2 * SCRAPE_SECONDS
    scrapes = moments(scraped, 'up{job="foreshock"} == 1', end)  # a busy machine may lose some
    assert len(scrapes) > SCRAPES / 2
    blinks, never, asked = {}, {}, 0
    for query in queries():
        if query.kind == "rule":
            continue
        asked += 1
        by_run = {}
        for run in ("plain", "clips"):
            found = by_run[run] = moments(scraped, concrete(query.expr, run=run, rate_interval="4s"), end)
            if found and (lacking := {moment for moment in scrapes if moment > min(found)} - found):
                blinks[query.where, run] = f"none at {len(lacking)} of {len(scrapes)}: {query.expr}"
        if not any(by_run.values()) and not any(name in query.expr for name in NOTHING_TO_SHOW):
            never[query.where] = query.expr
    assert asked > 80
    assert (blinks, never) == ({}, {})
