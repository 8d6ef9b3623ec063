"""The benchmark of the service scrapes, tells and starts; what it measures is for a quiet machine."""

import asyncio
import json
import uuid
from pathlib import Path

import pytest
from tests.server.postgresql import new_database, started_postgres

from foreshock.benchmarks import service_load


@pytest.mark.full
@pytest.mark.servers
def test_the_benchmark_of_the_service_scrapes_tells_and_starts(tmp_path: Path) -> None:
    with started_postgres() as postgres:
        url = asyncio.run(new_database(postgres, f"bench_{uuid.uuid4().hex[:8]}"))
        path = tmp_path / "service.json"
        report = service_load.main(path, database_url=url, runs=20, listeners=10, ranks=12, replicas=(2,))
    assert json.loads(path.read_text()) == report
    assert {"all runs new", "all runs changed", "nothing changed"} <= set(report["scrapes"])
    assert len(report["streams"]["seconds_until_all_were_told"]) == 5
    assert [start["replicas"] for start in report["starts"]] == [2]
    assert {start["deadlocks"] for start in report["starts"]} == {0}
