"""The benchmarks of the service run; what they measure is for a quiet machine."""

import asyncio
import json
import uuid
from pathlib import Path

import pytest
from tests.server.postgresql import new_database

from foreshock.benchmarks import service_load
from foreshock.benchmarks.ingest_clients import Load, run_load
from foreshock.server.testing import LiveService


def test_clients_of_the_ingest_benchmark_are_answered(live_service: LiveService) -> None:
    result = run_load(Load(live_service.url, clients=2, runs=2, seconds=1.0, name="bench"), processes=1)
    assert set(result.statuses) == {200}
    assert result.stored_per_second > 0
    assert len(result.latencies) == result.statuses[200]


@pytest.mark.full
@pytest.mark.servers
def test_the_benchmark_of_the_service_scrapes_tells_and_starts(tmp_path: Path, postgres: str) -> None:
    url = asyncio.run(new_database(postgres, f"bench_{uuid.uuid4().hex[:8]}"))
    path = tmp_path / "service.json"
    report = service_load.main(path, database_url=url, runs=20, listeners=10, ranks=12, replicas=(2,))
    assert json.loads(path.read_text()) == report
    assert {"all runs new", "all runs changed", "nothing changed"} <= set(report["scrapes"])
    assert len(report["streams"]["seconds_until_all_were_told"]) == 5
    assert [start["replicas"] for start in report["starts"]] == [2]
    assert {start["deadlocks"] for start in report["starts"]} == {0}
