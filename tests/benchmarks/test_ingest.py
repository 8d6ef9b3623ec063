"""What the ingest benchmark makes of a load: shares of its answers, time of the processor, and when it is over."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.benchmarks import ingest
from foreshock.benchmarks.ingest_clients import HEADS, LAYERS, Result, template

SLOW, QUICK = 2 * ingest._TARGET_SECONDS, ingest._TARGET_SECONDS / 2


@given(slow=st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_service_is_normal_again_from_the_first_second_after_which_none_is_slow(slow: list[bool]) -> None:
    latencies = [(second + part / 10, SLOW if late else QUICK) for second, late in enumerate(slow) for part in range(9)]
    expected = next((second for second in range(len(slow)) if not any(slow[second:])), None)
    assert ingest._recovered(Result(latencies=latencies), float(len(slow))) == expected


def test_one_slow_answer_in_a_hundred_is_borne_and_a_second_without_any_is_not() -> None:
    answers = [(0.005 * i, QUICK) for i in range(199)]
    assert ingest._recovered(Result(latencies=[*answers, (0.5, SLOW)]), 1.0) == 0.0
    assert ingest._recovered(Result(latencies=[*answers, *[(0.5, SLOW)] * 4]), 1.0) is None
    assert ingest._recovered(Result(latencies=answers), 2.0) is None  # nothing was answered in the last second


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


def test_nothing_that_was_stored_has_no_latency() -> None:
    figures = ingest._figures(Result(statuses=Counter({429: 7}), seconds=1.0), cpu_seconds=0.1)
    assert math.isnan(figures["p99_seconds"])
    assert (figures["share_2xx"], figures["share_429"]) == (0.0, 1.0)


def test_a_report_says_where_with_what_and_on_which_store_it_was_measured() -> None:
    report = ingest.device(None)
    assert report["command"].startswith("foreshock bench ingest")
    assert report["store"].startswith("SQLite")
    assert ingest.device("postgresql://host/db")["store"] == "PostgreSQL"
    assert report["batch"] == {"layers": LAYERS, "heads": HEADS, "bytes": len(template())}
    assert report["device"]["cpu"]
    assert {"python", "sqlite", "foreshock", "fastapi"} <= set(report["versions"])
