"""Ranks merge as the contract says; steps done again replace those of the dead process; the newest waits for all."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.metrics.catalog import BY_KEY, METRICS
from foreshock.contract.slots import merge_words
from foreshock.contract.wire import Array, Sample
from foreshock.server.readings import merge_scalars
from foreshock.server.store.reading import SCALARS
from foreshock.server.testing import FakeRank

RULES: dict[str, str] = {metric.sample: metric.across_ranks for metric in METRICS if metric.sample}
one_ranks_numbers = st.fixed_dictionaries(
    {name: st.none() | st.floats(min_value=-1e6, max_value=1e6) | st.just(math.nan) for name in SCALARS}
)


@given(parts=st.lists(one_ranks_numbers, min_size=1, max_size=6))
def test_a_run_s_number_is_the_mean_or_the_extreme_of_the_ranks_that_sent_it(
    parts: list[dict[str, float | None]],
) -> None:
    merged = merge_scalars(parts)
    for name in SCALARS:
        sent = [value for part in parts if (value := part[name]) is not None]
        found = merged[name]
        if not sent:
            assert found is None, "what no rank sent has no value"
        elif any(map(math.isnan, sent)):
            assert found is not None
            assert math.isnan(found), "one rank's NaN is not averaged away"
        elif RULES.get(name) == "mean":
            assert found == pytest.approx(math.fsum(sent) / len(sent), abs=1e-6)
        else:
            assert found == (min(sent) if RULES.get(name) == "min" else max(sent))


async def test_ranks_merge_exactly_as_the_contract_says_and_absent_heads_are_not_zero(service: Any) -> None:
    first, second, other = FakeRank(rank=0), FakeRank(rank=1), FakeRank(rank=2, heads=(3, 4))
    for rank in (other, second, first):
        await service.store(rank, rank.started())
    for rank in (second, first):
        await service.store(rank, rank.sample(10))
    merged = merge_words([first.words(10), second.words(10)])
    for key in ("head.score_offset", "head.tied_rows_bf16", "head.score_max", "head.nonfinite_rows"):
        reading = BY_KEY[key].head
        assert reading is not None
        assert reading.read is not None
        shown = await service.get("/v1/runs/run-1/matrix", metric=key)
        assert shown["heads"] == [0, 1, 2, 3, 4]
        values = np.array(shown["values"], dtype=float)
        assert np.array_equal(values[:, :3].ravel(), reading.read(merged))
        assert np.isnan(values[:, 3:]).all()


async def test_the_newest_reading_waits_for_the_ranks_that_lag_behind(service: Any) -> None:
    fast, slow = FakeRank(rank=0), FakeRank(rank=1, heads=(3, 4))
    await service.store(fast, fast.started(), fast.sample(10), fast.sample(20))
    await service.store(slow, slow.started(), slow.sample(10))
    assert (await service.get("/v1/runs/run-1"))["last_step"] == 10
    await service.store(slow, slow.sample(20))
    assert (await service.get("/v1/runs/run-1"))["last_step"] == 20


async def test_what_is_not_finite_arrives_and_is_shown(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1, loss=math.inf), rank.sample(2, loss=math.nan))
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"]
    assert line["last"] == ["Infinity", "NaN"]
    metrics = (await service.client.get("/metrics")).text
    assert 'foreshock_run_loss{run="run-1"} NaN' in metrics


async def test_samples_without_arrays_or_start_are_stored_and_read_once_the_start_arrives(service: Any) -> None:
    rank = FakeRank()
    await service.post(rank.batch(rank.sample(5), sequence=2))
    bare = Sample(step=6, since_step=5, unix_seconds=0.0, query_norm=Array.of(np.ones(6, dtype=np.float32)))
    await service.post(rank.batch(bare, sequence=3))
    assert (await service.get("/v1/runs/run-1/matrix", metric="head.score_max"))["values"] == []
    await service.post(rank.batch(rank.started(), sequence=1))
    shown = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=5)
    assert np.array(shown["values"]).shape == (2, 3)
    unseen = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=6)
    assert unseen["values"] == [[None] * 3] * 2
