"""Storing and reading samples without loss, and merging the samples of ranks."""

import math
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, select
from tests.server.conftest import Service

from foreshock.contract.metrics.catalog import BY_KEY, METRICS
from foreshock.contract.slots import SLOT_COUNT, merge_words
from foreshock.contract.wire import Array, Sample
from foreshock.server.readings import (
    LIVE_SAMPLES,
    SCALARS,
    axis_of,
    head_arrays,
    merge_scalars,
    merged_steps,
    pack_sample,
    unpack_arrays,
    unpack_scalars,
)
from foreshock.server.store.schema import samples as stored_samples
from foreshock.server.testing import FakeRank

HEADS = 3
RULES: dict[str, str] = {metric.sample: metric.across_ranks for metric in METRICS if metric.sample}
SENT = ("states", "modes", "query_norm", "risk")


def arrays(bits: int, count: int, dtype: type, shape: tuple[int, ...]) -> st.SearchStrategy[Array]:
    """Arrays of arbitrary bit patterns, including NaN payloads, -0.0 and extreme values."""
    numbers = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    return numbers.map(lambda own: Array.of(np.array(own, f"u{bits // 8}").view(dtype).reshape(shape)))


norms = arrays(32, HEADS, np.float32, (HEADS,))
samples = st.builds(
    Sample,
    step=st.just(7),
    since_step=st.just(6),
    unix_seconds=st.just(1.0),
    states=st.none() | arrays(64, HEADS * SLOT_COUNT, np.int64, (HEADS, SLOT_COUNT)),
    modes=st.none() | arrays(32, HEADS, np.int32, (HEADS,)),
    query_norm=st.none() | norms,
    risk=st.none() | norms,
    **{name: st.none() | st.just(math.nan) | st.floats(min_value=0, allow_infinity=False) for name in SCALARS},
)


@given(sample=samples, cut=st.integers(0, 2**16))
def test_sample_round_trips_exactly_and_truncated_blob_yields_no_wrong_data(sample: Sample, cut: int) -> None:
    row = pack_sample(sample)
    assert not any(isinstance(value, float) and math.isnan(value) for value in row.values()), (
        "NaN must not be stored in a column"
    )
    sent = {name: array.raw for name in SENT if (array := getattr(sample, name)) is not None}
    found = unpack_arrays(row["arrays"])
    assert {name: array.tobytes() for name, array in found.items()} == sent
    assert set(unpack_arrays(row["arrays"], frozenset({"modes", "risk"}))) == {"modes", "risk"} & sent.keys()
    for name, value in unpack_scalars(SimpleNamespace(**row)).items():
        expected = getattr(sample, name)
        assert value == expected or (expected is not None and math.isnan(expected) and math.isnan(value or 0.0))
    blob = row["arrays"] or b""
    truncated = SimpleNamespace(id=1, arrays=blob[: cut % (len(blob) + 1)])
    for name, array in head_arrays(truncated, HEADS).items():
        assert array.tobytes() == sent[name]


rank_scalars = st.fixed_dictionaries(
    {name: st.none() | st.floats(min_value=-1e6, max_value=1e6) | st.just(math.nan) for name in SCALARS}
)


@given(parts=st.lists(rank_scalars, min_size=1, max_size=6))
def test_run_scalar_is_mean_or_extreme_of_reporting_ranks(
    parts: list[dict[str, float | None]],
) -> None:
    merged = merge_scalars(parts)
    for name in SCALARS:
        sent = [value for part in parts if (value := part[name]) is not None]
        found = merged[name]
        if not sent:
            assert found is None, "expected no value without a report"
        elif any(map(math.isnan, sent)):
            assert found is not None
            assert math.isnan(found), "the NaN of one rank must not be averaged away"
        elif RULES.get(name) == "mean":
            assert found == pytest.approx(math.fsum(sent) / len(sent), abs=1e-6)
        else:
            assert found == (min(sent) if RULES.get(name) == "min" else max(sent))


async def test_ranks_merge_as_the_contract_says_and_missing_heads_are_not_zero(service: Any) -> None:
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
    await service.store(first, first.sample(20))
    await service.store(second, second.sample(20))
    await service.store(other, other.sample(10), other.sample(20))
    await service.store(first, first.sample(30))
    assert (await service.get("/v1/runs/run-1"))["last_step"] == 20, "the newest step must wait for slow ranks"


async def test_nonfinite_loss_is_stored_and_shown(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(), rank.sample(1, loss=math.inf), rank.sample(2, loss=math.nan))
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"]
    assert line["last"] == ["Infinity", "NaN"]
    metrics = (await service.client.get("/metrics")).text
    assert 'foreshock_run_loss{run="run-1"} NaN' in metrics


async def test_samples_become_readable_when_the_start_event_arrives(service: Any, rank: FakeRank) -> None:
    await service.post(rank.batch(rank.sample(5), sequence=2))
    bare = Sample(step=6, since_step=5, unix_seconds=0.0, query_norm=Array.of(np.ones(6, dtype=np.float32)))
    await service.post(rank.batch(bare, sequence=3))
    assert (await service.get("/v1/runs/run-1/matrix", metric="head.score_max"))["values"] == []
    await service.post(rank.batch(rank.started(), sequence=1))
    shown = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=5)
    assert np.array(shown["values"]).shape == (2, 3)
    unseen = await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=6)
    assert unseen["values"] == [[None] * 3] * 2


async def test_merging_many_ranks_never_loads_all_samples_at_once(service: Service) -> None:
    ranks, steps = 32, range(1, 17)
    for number in range(ranks):
        rank = FakeRank(rank=number, layers=4, heads=range(8))
        await service.store(rank, rank.started(), *map(rank.sample, steps))

    def read(connection: Connection) -> tuple[list[int], int, int]:
        sizes = connection.execute(select(stored_samples.c.arrays)).scalars()
        stored = sum(map(len, sizes))
        tracemalloc.start()
        try:
            merged = [
                int(step)
                for some in merged_steps(connection, axis_of(connection, 1), LIVE_SAMPLES)
                for step in some.steps
            ]
            return merged, tracemalloc.get_traced_memory()[1], stored
        finally:
            tracemalloc.stop()

    merged, peak, stored = await service.app.state.store.read(read)
    assert merged == list(steps)
    assert peak < stored / 2
