"""Roll-ups say what the samples say, and go when a sample comes late."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.event import listen
from tests.server.drawn_runs import store_run

from foreshock.server.readings import SPAN, Roller, build, built_spans
from foreshock.server.testing import FakeRank


@pytest.mark.full
async def test_rolled_up_spans_say_what_the_samples_say(service: Any) -> None:
    await store_run(service, range(4, 9000, 4))
    lines = ["run.loss", "run.worst_risk", "head.score_max:1:2", "head.score_offset:0:1", "head.score_offset:1"]
    query = {"line": lines, "max_points": 8, "from_step": 0}
    before = await service.get("/v1/runs/run-1/curves", **query)
    for span in range(8):
        assert await build(service.app.state.store, 1, span)
    with service.app.state.store.reader.engine.begin() as connection:
        count = connection.execute(text("SELECT count(*) FROM rollups")).scalar()
    assert count > 0
    after = await service.get("/v1/runs/run-1/curves", **query)
    for old, new in zip(before["lines"], after["lines"], strict=True):
        # A bucket of 128 steps counts where it ends, so compare where both series hold all that came before.
        for key, pick in (("low", min), ("high", max)):
            assert pick(old[key]) == pytest.approx(pick(new[key]), rel=1e-6)
        assert old["steps"][-1] == new["steps"][-1]
        assert old["last"][-1] == pytest.approx(new["last"][-1], rel=1e-6)


async def test_a_wide_runs_few_samples_are_drawn_from_its_roll_ups(service: Any) -> None:
    await store_run(service, range(1000, 9000, 1000))
    query = {"line": ["head.score_max:1:2", "head.score_max:0", "run.loss"], "max_points": 50}
    before = await service.get("/v1/runs/run-1/curves", **query)
    for span in range(8):
        assert await build(service.app.state.store, 1, span)
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(text("UPDATE samples SET arrays = NULL"))
    after = await service.get("/v1/runs/run-1/curves", **query)
    for old, new in zip(before["lines"], after["lines"], strict=True):
        assert new["steps"] == old["steps"]
        for key in ("low", "high", "last"):
            assert new[key] == pytest.approx(old[key], rel=1e-6)


async def heads_read_once(service: Any) -> FakeRank:
    """A run of five spans whose heads were read in the second alone, all rolled up but for the last."""
    rank = FakeRank(layers=1)
    losses = [rank.sample(step).model_copy(update=dict.fromkeys(HEADS)) for step in (100, 2100, 3200, 5000)]
    await service.store(rank, rank.started(), *losses, rank.sample(1100))
    for span in range(4):
        assert await build(service.app.state.store, 1, span)
    return rank


HEADS = ("states", "modes", "risk")


@pytest.mark.promise("S5")
@pytest.mark.parametrize("line", ["head.score_max", "head.score_max:0"])
async def test_a_late_sample_of_the_only_span_with_heads_is_drawn_at_once(service: Any, line: str) -> None:
    rank = await heads_read_once(service)
    await service.store(rank, rank.sample(1300))
    [drawn] = (await service.get("/v1/runs/run-1/curves", line=line, max_points=10))["lines"]
    assert [step for step, value in zip(drawn["steps"], drawn["last"], strict=True) if value is not None] == [1300]


def test_a_span_that_changed_is_rolled_up_again_after_a_restart_once_it_rests(play: Any) -> None:
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
        assert await built(service) == {0, 2, 3}, "a rank that lags behind has sent some of it since the last look"
        await roller.build_due(closing)
        assert await built(service) == {0, 1, 2, 3}
        await roller.build_due(closing)
        await roller.build_due(closing)
        assert await built(service) == {0, 1, 2, 3}, "the run has not passed its newest span"

    play(late)
    play(after)


async def test_a_late_sample_throws_its_roll_up_away(service: Any) -> None:
    rank = await store_run(service, range(1, 2200))
    for span in (0, 1):
        assert await build(service.app.state.store, 1, span)
    late = FakeRank(rank=1)
    await service.store(late, late.started(), late.sample(500, loss=-500.0))
    lines = (await service.get("/v1/runs/run-1/curves", line="run.loss", max_points=4))["lines"]
    assert min(lines[0]["low"]) == (-500.0 + 500 % 97) / 2
    assert rank.sequence > 1


@pytest.mark.parametrize(
    ("meanwhile", "kept"),
    [
        ("nothing", True),
        ("a sample of another span", True),
        ("a late sample", False),
        ("a start that does its steps again", False),
        ("a start with other heads", False),
    ],
)
async def test_what_changes_a_span_while_it_is_rolled_up_is_not_kept_and_no_process_start_is_read_for_it(
    service: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: str, kept: bool
) -> None:
    store, rank, said = service.app.state.store, FakeRank(layers=1), list[str]()
    await service.store(rank, rank.started(), *(rank.sample(step) for step in range(100, 2100, 100)))
    again, wider = FakeRank(layers=1, boot="b2"), FakeRank(rank=1, layers=2)
    events = {
        "a sample of another span": (rank, rank.sample(5000)),
        "a late sample": (rank, rank.sample(150)),
        "a start that does its steps again": (again, again.started(step=500)),
        "a start with other heads": (wider, wider.started()),
    }
    write = store.write

    async def late(change: Any) -> Any:
        monkeypatch.setattr(store, "write", write)
        if meanwhile in events:
            await service.store(*events[meanwhile])
        listen(store.writer.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
        return await write(change)

    monkeypatch.setattr(store, "write", late)
    assert await build(store, 1, 0) == kept
    assert said
    assert [statement for statement in said if "boots" in statement] == []
    assert await build(store, 1, 0)
