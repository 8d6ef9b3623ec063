"""The ingest benchmark: its batches are accepted, and its figures follow from the responses."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.benchmarks import ingest
from foreshock.benchmarks.ingest import HEADS, LAYERS, Load, Result, body, run_load, template
from foreshock.contract.wire import Batch, Sample
from foreshock.server.testing import LiveService


@given(statuses=st.dictionaries(st.sampled_from([200, 400, 429, 500, 503]), st.integers(1, 500), min_size=1))
def test_shares_count_all_responses_and_costs_only_stored_batches(statuses: dict[int, int]) -> None:
    result = Result(statuses=Counter(statuses), latencies=[0.1] * 3, seconds=4.0, cpu_seconds=1.0)
    figures = ingest.figures_of(result, cpu_seconds=2.0)
    total, stored = sum(statuses.values()), statuses.get(200, 0)
    assert figures["share_2xx"] == round(stored / total, 4)
    assert figures["share_5xx"] == round((statuses.get(500, 0) + statuses.get(503, 0)) / total, 4)
    assert figures["batches_per_second"] == round(stored / 4, 1)
    assert figures["service_cores"] == 0.5
    assert figures["cpu_milliseconds_per_batch"] == pytest.approx(2000 / max(1, stored), abs=1e-3)
    assert (figures["p50_seconds"], figures["p99_seconds"]) == (0.1, 0.1)


@pytest.mark.full
def test_ingest_benchmark_requests_succeed(tmp_path: Path) -> None:
    with LiveService(tmp_path) as service:
        result = run_load(Load(service.url, clients=2, runs=2, seconds=1.0, name="bench"))
    assert set(result.statuses) == {200}
    assert len(result.latencies) == result.statuses[200]


def test_each_body_has_one_sample_of_all_heads_that_continues_the_previous_one() -> None:
    shape = template()
    batches = [Batch.model_validate_json(body(shape, number)) for number in (1, 2, 3, 10**6)]
    assert [batch.sequence for batch in batches] == [1, 2, 3, 10**6]
    samples = [event for batch in batches for event in batch.events]
    assert all(isinstance(sample, Sample) for sample in samples)
    assert [(s.since_step, s.step) for s in samples if isinstance(s, Sample)] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (10**6 - 1, 10**6),
    ]
    for sample in samples:
        assert isinstance(sample, Sample)
        words = sample.words()
        assert words is not None
        assert len(words) == LAYERS * HEADS
