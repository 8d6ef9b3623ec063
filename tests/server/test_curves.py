"""Curves, heat maps and the roll-ups that they are read from."""

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.event import listen

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.slots import Slot
from foreshock.contract.wire import Array
from foreshock.server.readings import BUCKET, SPAN, Roller, build, built_spans
from foreshock.server.testing import FakeRank


async def test_curve_keeps_every_minimum_and_maximum(service: Any) -> None:
    await store_run(service, range(1, 1001))
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss", max_points=7))["lines"]
    assert len(line["steps"]) == 7
    values = np.arange(1, 1001) % 97
    bounds = [0, *line["steps"]]
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        assert (line["low"][i], line["high"][i]) == (values[begin:end].min(), values[begin:end].max())
        assert line["last"][i] == values[end - 1]


async def test_curve_shows_one_head_or_the_worst_head_of_each_layer(service: Any) -> None:
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


async def test_worst_head_of_point_has_largest_absolute_value(service: Any) -> None:
    rank = await store_run(service, range(1, 61))
    metric = BY_KEY["head.score_offset"]
    assert metric.head is not None
    assert metric.head.read is not None
    [line] = (await service.get("/v1/runs/run-1/curves", line="head.score_offset:1", max_points=6))["lines"]
    of_layer = np.stack([metric.head.read(rank.words(step))[3:] for step in range(1, 61)])
    heads = np.argmax(np.abs(of_layer), axis=1)
    worst = np.take_along_axis(of_layer, heads[:, None], axis=1).reshape(6, 10)
    assert (line["low"], line["high"]) == (worst.min(axis=1).tolist(), worst.max(axis=1).tolist())
    assert line["worst_head"] == heads.reshape(6, 10)[range(6), np.argmax(np.abs(worst), axis=1)].tolist()


async def test_many_curves_have_fewer_points_each(service: Any) -> None:
    await store_run(service, range(1, 3001))
    [whole] = (await service.get("/v1/runs/run-1/curves", line="run.loss", max_points=3000))["lines"]
    some = (await service.get("/v1/runs/run-1/curves", line=["run.loss"] * 256, max_points=3000))["lines"]
    assert [len(whole["steps"]), *{len(line["steps"]) for line in some}] == [3000, 1500]
    assert {max(line["high"]) for line in some} == {max(whole["high"])}


async def test_matrix_shows_last_measured_value_of_rarely_measured_metric(service: Any) -> None:
    rank, norms, samples = FakeRank(), {40: 7.0, 4000: 8.0}, []
    for step in range(20, 6000, 20):
        samples.append(rank.sample(step, since=step - 20))
        if step in norms:
            own = Array.of(np.full(rank.count, norms[step], dtype=np.float32))
            samples[-1] = samples[-1].model_copy(update={"query_norm": own})
    await service.store(rank, rank.started(), *samples)

    async def shown(step: int) -> tuple[int | None, set[float | None]]:
        found = await service.get("/v1/runs/run-1/matrix", metric="head.query_norm", step=step)
        assert found["step"] == step
        return found["measured_step"], {each for row in found["values"] for each in row}

    expected: dict[int, tuple[int | None, float | None]] = {
        20: (None, None),
        40: (40, 7.0),
        2000: (40, 7.0),
        4000: (4000, 8.0),
        5980: (4000, 8.0),
    }
    for step, (measured, value) in expected.items():
        assert await shown(step) == (measured, {value})
    for span in range(5):
        assert await build(service.app.state.store, 1, span)
    expected[3980] = (40, 7.0)  # further back than the search through samples goes
    for step, (measured, value) in expected.items():
        found, values = await shown(step)
        assert values == {value}
        assert found is measured is None or 0 <= (found or 0) - (measured or 0) < BUCKET


async def store_run(service: Any, steps: range) -> FakeRank:
    rank = FakeRank()
    await service.store(rank, rank.started())
    events = [rank.sample(step, since=step - steps.step, loss=float(step % 97)) for step in steps]
    for i in range(0, len(events), 400):
        await service.store(rank, *events[i : i + 400])
    return rank


async def test_roll_ups_equal_samples_and_are_read_instead(service: Any) -> None:
    await store_run(service, range(8, 9000, 8))
    lines = ["run.loss", "run.worst_risk", "head.score_max:1:2", "head.score_offset:0", "head.score_offset:1"]
    query: dict[str, Any] = {"line": [*lines, "head.risk:9"], "max_points": 8, "from_step": 0}
    before = await service.get("/v1/runs/run-1/curves", **query)
    assert [line["metric"] for line in before["lines"]] == [name.split(":")[0] for name in query["line"]]
    assert (before["unknown"], before["lines"].pop()["steps"]) == (["head.risk:9"], [])
    for name, line in zip(lines, before["lines"], strict=True):
        assert (await service.get("/v1/runs/run-1/curves", **{**query, "line": name}))["lines"] == [line]
    for span in range(8):
        assert await build(service.app.state.store, 1, span)
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(text("UPDATE samples SET arrays = NULL WHERE step < 8192"))
    after = await service.get("/v1/runs/run-1/curves", **{**query, "line": lines})
    for old, new in zip(before["lines"], after["lines"], strict=True):
        # A bucket of 128 steps is placed at its end, so compare the points at which both series cover the same steps.
        for key, pick in (("low", min), ("high", max)):
            assert pick(old[key]) == pytest.approx(pick(new[key]), rel=1e-6)
        if old["worst_head"] is not None:
            worst = [np.argmax(np.maximum(line["high"], np.negative(line["low"]))) for line in (old, new)]
            assert old["worst_head"][worst[0]] == new["worst_head"][worst[1]]
        assert old["steps"][-1] == new["steps"][-1]
        assert old["last"][-1] == pytest.approx(new["last"][-1], rel=1e-6)


HEADS = ("states", "modes", "risk")


async def heads_read_once(service: Any, *others: FakeRank) -> FakeRank:
    """A run of five spans with head data only in the second; all spans except the last are rolled up."""
    rank = FakeRank(layers=1)
    for other in others:
        await service.store(other, other.started())
    losses = [rank.sample(step).model_copy(update=dict.fromkeys(HEADS)) for step in (100, 2100, 3200, 5000)]
    await service.store(rank, rank.started(), *losses, rank.sample(1100, loss=100.0))
    for span in range(4):
        assert await build(service.app.state.store, 1, span)
    return rank


@pytest.mark.promise("S5")
async def test_late_sample_is_shown_although_its_span_is_rolled_up(service: Any) -> None:
    other = FakeRank(layers=1, rank=1)
    rank = await heads_read_once(service, other)
    await service.store(rank, rank.sample(1300))
    await service.store(other, other.sample(1100, loss=0.0))
    for line in ("head.score_max", "head.score_max:0"):
        [drawn] = (await service.get("/v1/runs/run-1/curves", line=line, max_points=10))["lines"]
        assert [step for step, value in zip(drawn["steps"], drawn["last"], strict=True) if value is not None] == [1300]
    [drawn] = (await service.get("/v1/runs/run-1/curves", line="run.loss", max_points=1))["lines"]
    assert drawn["high"] == [50.0], "expected the mean of both ranks, not the earlier roll-up"


def test_changed_span_is_rolled_up_again_after_restart_when_samples_stop(run_scenario: Any) -> None:
    lagging = FakeRank(layers=1, rank=1)

    async def late(service: Any) -> None:
        rank = await heads_read_once(service)
        await service.store(lagging, lagging.started())
        await service.store(rank, rank.sample(1300))
        for span in (0, 2, 3):
            assert await build(service.app.state.store, 1, span)

    async def built(service: Any) -> set[int]:
        with service.app.state.store.reader.engine.begin() as connection:
            return built_spans(connection, 1, 0, 5 * SPAN - 1)

    async def after(service: Any) -> None:
        roller, closing = Roller(service.app.state.store), asyncio.Event()
        assert await built(service) == {0, 2, 3}
        await roller.build_due(closing)
        await service.store(lagging, lagging.sample(1400))
        await roller.build_due(closing)
        assert await built(service) == {0, 2, 3}, "a slow rank sent a sample of span 1 after the previous check"
        await roller.build_due(closing)
        assert await built(service) == {0, 1, 2, 3}
        await roller.build_due(closing)
        await roller.build_due(closing)
        assert await built(service) == {0, 1, 2, 3}, "the newest span is not complete"

    run_scenario(late)
    run_scenario(after)


@pytest.mark.parametrize(
    ("meanwhile", "stored"),
    [
        ("nothing", True),
        ("a sample of another span", True),
        ("a late sample", False),
        ("a restart from an earlier step", False),
        ("a start with other heads", False),
    ],
)
async def test_roll_up_of_span_that_changes_meanwhile_is_discarded_without_reading_boots(
    service: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: str, stored: bool
) -> None:
    store, rank, statements = service.app.state.store, FakeRank(layers=1), list[str]()
    await service.store(rank, rank.started(), *(rank.sample(step) for step in range(100, 2100, 100)))
    restarted, wider = FakeRank(layers=1, boot="b2"), FakeRank(rank=1, layers=2)
    events = {
        "a sample of another span": (rank, rank.sample(5000)),
        "a late sample": (rank, rank.sample(150)),
        "a restart from an earlier step": (restarted, restarted.started(step=500)),
        "a start with other heads": (wider, wider.started()),
    }
    write = store.write

    async def late(change: Any) -> Any:
        monkeypatch.setattr(store, "write", write)
        if meanwhile in events:
            await service.store(*events[meanwhile])
        listen(store.writer.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
        return await write(change)

    monkeypatch.setattr(store, "write", late)
    assert await build(store, 1, 0) == stored
    assert statements
    assert [statement for statement in statements if "boots" in statement] == []
    assert await build(store, 1, 0)


async def test_steps_of_long_run_are_listed_without_full_scan(service: Any) -> None:
    count, interval, progress = 100_000, 100, list[None]()
    rank, store = FakeRank(), service.app.state.store
    await service.store(rank, rank.started(), rank.sample(1))
    with store.writer.engine.begin() as connection:
        connection.execute(
            text(
                "WITH RECURSIVE n(step) AS (SELECT 2 UNION ALL SELECT step + 1 FROM n WHERE step < :count) "
                "INSERT INTO samples (run_id, boot_id, sequence, position, step, since_step, nan_columns) "
                "SELECT 1, 1, step, 0, step, step - 1, 0 FROM n"
            ),
            {"count": count},
        )
    listen(
        store.reader.engine,
        "checkout",
        lambda own, *_: own.set_progress_handler(lambda: progress.append(None), interval),
    )
    steps = (await service.get("/v1/runs/run-1/matrix", metric="head.score_max", step=1, max_steps=500))["steps"]
    assert 0 < interval * len(progress) < count, "SQLite executes several instructions for each row that it scans"
    assert (steps[0], steps[-1]) == (1, count)
    assert 490 <= len(steps) <= 500
    assert max(np.diff(steps)) < 2 * count / 490


async def test_matrix_of_layers_with_distinct_heads_is_paginated(service: Any) -> None:
    rank = FakeRank(layers=1000, heads=(0,))
    rank.layers = tuple(layer.model_copy(update={"heads": (layer.layer,)}) for layer in rank.layers)
    await service.store(rank, rank.started(), rank.sample(1))
    seen: dict[int, float] = {}
    first_layer = 0
    while True:
        response = await service.client.get(f"/v1/runs/run-1/matrix?metric=head.score_max&from_layer={first_layer}")
        assert response.status_code == 200
        assert len(response.content) < 4 * 2**20
        page = response.json()
        for layer, row in zip(page["layers"], page["values"], strict=True):
            [value] = [value for value in row if value is not None]
            assert row[page["heads"].index(layer)] == value
            seen[layer] = value
        if page["next_layer"] is None:
            break
        assert page["next_layer"] == page["layers"][-1] + 1
        first_layer = page["next_layer"]
    words = rank.words(1).view(np.float64)
    assert [seen[layer] for layer in range(1000)] == pytest.approx(words[:, Slot.SCORE_MAX])
