"""import asyncio"""

import math
from typing import Any

import numpy as np

from foreshock.contract.wire import Array, Sample
from foreshock.server.testing import FakeRank


async def test_a_stored_batch_is_acknowledged_and_shown(service: Any) -> None:
    rank = FakeRank()
    ack = await service.store(rank, rank.started(), rank.sample(10, since=0))
    assert (ack.boot, ack.acknowledged, ack.commands) == ("b1", 1, ())
    [run] = (await service.get("/v1/runs"))["runs"]
    assert (run["run"], run["status"], run["last_step"], run["loss"]) == ("run-1", "active", 10, 3.0)


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
