"""Prometheus scrapes the replicas of a cluster as one target, since the alert rules take each run to be there once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.e2e.running import Server, Start, eventually, prometheus, starter

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.server.testing import FakeRank, LiveService

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
RULES = ROOT / "src/foreshock/dashboards" / "generated" / "prometheus-rules.yml"
SECRET = "a-secret-of-sixteen-or-more"
REPLICAS = 3


def endpoint() -> dict[str, Any]:
    """What the ServiceMonitor says of the service's port."""
    documents = yaml.safe_load_all((FOLDER / "common.yaml").read_text())
    [monitor] = [one for one in documents if one["kind"] == "ServiceMonitor"]
    [found] = monitor["spec"]["endpoints"]
    return dict(found)


def relabelings(address: str) -> list[dict[str, str]]:
    """As the operator writes them for Prometheus; the Service of the cluster is at `address` here."""
    words = {"targetLabel": "target_label", "sourceLabels": "source_labels"}
    rules = [{words.get(key, key): value for key, value in rule.items()} for rule in endpoint()["relabelings"]]
    return [rule | ({"replacement": address} if rule.get("target_label") == "__address__" else {}) for rule in rules]


def job(name: str, service: LiveService, rules: list[Any]) -> dict[str, Any]:
    """A job of the pods, each with the labels that the operator gives it."""
    address = service.url.removeprefix("http://")
    of_all = {"namespace": "foreshock", "service": "foreshock", "endpoint": "http", "container": "foreshock"}
    pods = [{"targets": [address], "labels": {**of_all, "pod": f"foreshock-{n}"}} for n in range(REPLICAS)]
    says = endpoint()
    return {
        "job_name": name,
        "metrics_path": says["path"],
        "honor_labels": says["honorLabels"],
        "authorization": {"type": says["authorization"]["type"], "credentials": SECRET},
        "static_configs": pods,
        "relabel_configs": rules,
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starter(tmp_path) as run:
        yield run


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LiveService]:
    (tmp_path / "service").mkdir()
    rank = FakeRank(run="team-a/a-run")
    with LiveService(tmp_path / "service", {"FORESHOCK_TOKEN": SECRET}) as service:
        service.post(rank.batch(rank.started(), rank.sample(1)), SECRET)
        yield service


def scraper(start: Start, folder: Path, jobs: list[dict[str, Any]]) -> Server:
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    folder.mkdir()
    return prometheus(start, folder, json.dumps(config))  # JSON is YAML


def asked(server: Server, query: str) -> list[float]:
    answer = httpx.get(f"{server.url}/api/v1/query", params={"query": query}, timeout=10).raise_for_status().json()
    return [float(found["value"][1]) for found in answer["data"]["result"]]


def health_of(server: Server, alert: str) -> tuple[str, str]:
    """Whether an alert's rule can be evaluated: ok, err or unknown, and the error."""
    answer = httpx.get(f"{server.url}/api/v1/rules", timeout=10).raise_for_status().json()
    [rule] = [r for group in answer["data"]["groups"] for r in group["rules"] if r["name"] == alert]
    return rule["health"], rule.get("lastError", "")


@pytest.mark.full
@pytest.mark.servers
def test_the_replicas_are_one_target_and_without_the_relabelings_a_rule_cannot_be_evaluated(
    start: Start, service: LiveService, tmp_path: Path
) -> None:
    address = service.url.removeprefix("http://")
    once = scraper(start, tmp_path / "once", [job("foreshock", service, relabelings(address))])
    # each pod has an address of its own; one service stands for all of them here
    apart = [{"target_label": "instance", "source_labels": ["pod"]}]
    often = scraper(start, tmp_path / "often", [job("foreshock", service, apart)])
    active = f"count({BY_KEY['run.active'].name})"
    eventually("all pods are scraped", lambda: asked(often, active) == [REPLICAS], 120)
    assert eventually("the one target is scraped", lambda: asked(once, active), 120) == [1.0]
    assert asked(once, "count(up)") == [1.0]
    assert eventually("rules ran", lambda: asked(once, "count_over_time(up[1m]) > 3"), 120)
    health, error = eventually(
        "the rule fails where runs are there several times",
        lambda: found if (found := health_of(often, "ForeshockRunHung"))[0] == "err" else None,
        120,
    )
    assert (health, "many-to-many" in error or "duplicate series" in error) == ("err", True), error
    eventually("the rule is evaluated", lambda: health_of(once, "ForeshockRunHung") == ("ok", ""), 120)
