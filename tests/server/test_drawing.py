"""Curves against the step: every extreme is kept, and many at once say what each says alone."""

import itertools
from typing import Any

import numpy as np
import pytest
from tests.server.drawn_runs import store_run

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.wire import Array
from foreshock.server.drawing import metric_of
from foreshock.server.problems import ProblemError
from foreshock.server.readings import build
from foreshock.server.testing import FakeRank


async def test_a_curve_keeps_every_minimum_and_maximum(service: Any) -> None:
    await store_run(service, range(1, 1001))
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss", max_points=7))["lines"]
    assert len(line["steps"]) == 7
    values = np.arange(1, 1001) % 97
    bounds = [0, *line["steps"]]
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        assert (line["low"][i], line["high"][i]) == (values[begin:end].min(), values[begin:end].max())
        assert line["last"][i] == values[end - 1]


async def test_a_head_a_layers_worst_head_and_every_layer_can_be_asked_for(service: Any) -> None:
    rank = await store_run(service, range(1, 4))
    for key in ("head.score_offset", "head.score_max"):
        metric = BY_KEY[key]
        assert metric.head is not None
        assert metric.head.read is not None
        truth = np.stack([metric.head.read(rank.words(step)) for step in (1, 2, 3)])
        [own] = (await service.get("/v1/runs/run-1/curves", line=f"{key}:1:2"))["lines"]
        assert own["last"] == truth[:, 5].tolist()
        lines = (await service.get("/v1/runs/run-1/curves", line=key))["lines"]
        assert [line["layer"] for line in lines] == [0, 1]
        worst = np.argmax(metric.badness(truth[:, 3:]), axis=1)
        assert lines[1]["worst_head"] == worst.tolist()
        assert lines[1]["last"] == [truth[i, 3 + head] for i, head in enumerate(worst)]


async def test_many_curves_at_once_say_what_each_says_alone(service: Any) -> None:
    await store_run(service, range(4, 9000, 4))
    for span in range(8):
        assert await build(service.app.state.store, 1, span)
    names = [
        "run.loss",
        "run.worst_risk",
        "head.score_max:1:2",
        "head.score_max:0",
        "head.score_offset:1",
        "head.risk:9",
    ]
    for query in ({"max_points": 8}, {"max_points": 500, "from_step": 2000, "to_step": 3000}):
        answer = await service.get("/v1/runs/run-1/curves", line=names, **query)
        found = answer["lines"]
        assert [line["metric"] for line in found] == [name.split(":")[0] for name in names]
        assert answer["unknown"] == ["head.risk:9"]
        assert found.pop()["steps"] == []
        for name, line in zip(names, found, strict=False):
            [same] = (await service.get("/v1/runs/run-1/curves", line=name, **query))["lines"]
            assert line == same
            assert len(same["steps"]) > 5


async def test_what_would_fill_the_memory_is_drawn_in_fewer_points(service: Any) -> None:
    await store_run(service, range(1, 3001))
    [whole] = (await service.get("/v1/runs/run-1/curves", line="run.loss", max_points=3000))["lines"]
    some = (await service.get("/v1/runs/run-1/curves", line=["run.loss"] * 256, max_points=3000))["lines"]
    assert [len(whole["steps"]), *{len(line["steps"]) for line in some}] == [3000, 1500]
    assert {max(line["high"]) for line in some} == {max(whole["high"])}


@pytest.mark.parametrize("rolled", [False, True], ids=["from samples", "from roll-ups"])
async def test_a_metric_that_is_measured_now_and_then_is_shown_as_it_was_last_measured(
    service: Any, rolled: bool
) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started())
    norms = {40: 7.0, 4000: 8.0}
    for step in range(20, 6000, 20):
        sample = rank.sample(step, since=step - 20)
        if step in norms:
            own = Array.of(np.full(rank.count, norms[step], dtype=np.float32))
            sample = sample.model_copy(update={"query_norm": own})
        await service.store(rank, sample)
    for span in range(5 if rolled else 0):
        assert await build(service.app.state.store, 1, span)
    expected = {
        20: (None, None),
        40: (40, 7.0),
        2000: (40, 7.0),
        3980: (40, 7.0),
        4000: (4000, 8.0),
        5980: (4000, 8.0),
    }
    if not rolled:
        del expected[3980]  # further back than samples are looked through
    for step, (measured, value) in expected.items():
        found = await service.get("/v1/runs/run-1/matrix", metric="head.query_norm", step=step)
        assert found["step"] == step
        assert {each for row in found["values"] for each in row} == {value}
        if measured is None:
            assert found["measured_step"] is None
        else:
            assert measured <= found["measured_step"] < measured + 128


def test_a_metric_that_does_not_exist_is_called_that_and_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(ProblemError, match=r"metric 'run.los' does not exist; did you mean 'run.loss'\? allowed are"):
        metric_of("run.los")
    with pytest.raises(ProblemError, match=r"metric 'run.loss' cannot be shown in this way; allowed are head"):
        metric_of("run.loss", per_head=True)
