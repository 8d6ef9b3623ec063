"""What the ingest benchmark makes of a load: shares of its answers and time of the processor."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.benchmarks import ingest
from foreshock.benchmarks.ingest_clients import HEADS, LAYERS, Result, template


@given(statuses=st.dictionaries(st.sampled_from([200, 400, 429, 500, 503]), st.integers(1, 500), min_size=1))
def test_shares_are_of_all_answers_and_costs_of_those_that_were_stored(statuses: dict[int, int]) -> None:
    result = Result(statuses=Counter(statuses), latencies=[(0.0, 0.1)] * 3, seconds=4.0, cpu_seconds=1.0)
    figures = ingest._figures(result, cpu_seconds=2.0)
    whole, stored = sum(statuses.values()), statuses.get(200, 0)
    assert figures["share_2xx"] == round(stored / whole, 4)
    assert figures["share_5xx"] == round((statuses.get(500, 0) + statuses.get(503, 0)) / whole, 4)
    assert figures["batches_per_second"] == round(stored / 4, 1)
    assert figures["service_cores"] == 0.5
    assert figures["cpu_milliseconds_per_batch"] == pytest.approx(2000 / max(1, stored), abs=1e-3)
    assert (figures["p50_seconds"], figures["p99_seconds"]) == (0.1, 0.1)


def test_a_report_says_where_with_what_and_on_which_store_it_was_measured() -> None:
    report = ingest.device(None)
    assert report["command"].startswith("foreshock bench ingest")
    assert report["store"].startswith("SQLite")
    assert ingest.device("postgresql://host/db")["store"] == "PostgreSQL"
    assert report["batch"] == {"layers": LAYERS, "heads": HEADS, "bytes": len(template())}
    assert report["device"]["cpu"]
    assert {"python", "sqlite", "foreshock", "fastapi"} <= set(report["versions"])
