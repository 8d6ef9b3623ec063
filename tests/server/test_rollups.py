"""Roll-ups say what the samples say, and go when a sample comes late."""

from typing import Any

import pytest
from sqlalchemy import text
from tests.server.drawn_runs import store_run

from foreshock.server.curves.rollups import build
from foreshock.server.testing import FakeRank


@pytest.mark.parametrize("metric", ["run.loss", "head.score_max", "head.score_offset", "run.worst_risk"])
def test_rolled_up_spans_say_what_the_samples_say(play: Any, metric: str) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(4, 9000, 4))
        query = {"metric": metric, "max_points": 8, "from_step": 0}
        if metric.startswith("head."):
            query |= {"layer": 1, "head": 2}
        before = await service.get("/v1/runs/run-1/series", **query)
        for span in range(8):
            assert await build(service.app.state.store, 1, span)
        async with service.app.state.store.read() as connection:
            count = (await connection.execute(text("SELECT count(*) FROM rollups"))).scalar()
        assert count > 0
        after = await service.get("/v1/runs/run-1/series", **query)
        for old, new in zip(before["lines"], after["lines"], strict=True):
            # A span of 1024 steps counts where it ends, so compare where both series hold all that came before.
            for key, pick in (("low", min), ("high", max)):
                assert pick(old[key]) == pytest.approx(pick(new[key]), rel=1e-6)
            assert old["steps"][-1] == new["steps"][-1]
            assert old["last"][-1] == pytest.approx(new["last"][-1], rel=1e-6)

    play(story)


def test_a_wide_runs_few_samples_are_drawn_from_its_roll_ups(play: Any) -> None:
    async def story(service: Any) -> None:
        await store_run(service, range(1000, 9000, 1000))
        query = {"line": ["head.score_max:1:2", "head.score_max:0", "run.loss"], "max_points": 50}
        before = await service.get("/v1/runs/run-1/curves", **query)
        for span in range(8):
            assert await build(service.app.state.store, 1, span)
        async with service.app.state.store.write() as connection:
            await connection.execute(text("UPDATE samples SET arrays = NULL"))
        after = await service.get("/v1/runs/run-1/curves", **query)
        for old, new in zip(before["lines"], after["lines"], strict=True):
            assert new["steps"] == old["steps"]
            for key in ("low", "high", "last"):
                assert new[key] == pytest.approx(old[key], rel=1e-6)

    play(story)


def test_a_late_sample_throws_its_roll_up_away(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = await store_run(service, range(1, 2200))
        for span in (0, 1):
            assert await build(service.app.state.store, 1, span)
        late = FakeRank(rank=1)
        await service.store(late, late.started(), late.sample(500, loss=-500.0))
        lines = (await service.get("/v1/runs/run-1/series", metric="run.loss", max_points=4))["lines"]
        assert min(lines[0]["low"]) == (-500.0 + 500 % 97) / 2
        assert rank.sequence > 1

    play(story)
