"""The clients of the ingest benchmark send batches that the service takes, each with numbers of its own."""

from pathlib import Path

import pytest

from foreshock.benchmarks.ingest_clients import HEADS, LAYERS, Load, _body, run_load, template
from foreshock.contract.wire import Batch, Sample
from foreshock.server.testing import LiveService


@pytest.mark.full
def test_clients_of_the_ingest_benchmark_are_answered(tmp_path: Path) -> None:
    with LiveService(tmp_path) as service:
        result = run_load(Load(service.url, clients=2, runs=2, seconds=1.0, name="bench"), processes=1)
    assert set(result.statuses) == {200}
    assert result.stored_per_second > 0
    assert len(result.latencies) == result.statuses[200]


def test_each_body_is_one_sample_of_every_head_that_goes_on_where_the_one_before_ended() -> None:
    shape = template()
    batches = [Batch.model_validate_json(_body(shape, number)) for number in (1, 2, 3, 10**6)]
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
