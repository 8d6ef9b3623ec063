"""Which process start of a rank is listened to, whatever the clocks of its nodes say and however its batches come."""

import time
from typing import Any

import pytest

from foreshock.contract.wire import AGE_HEADER
from foreshock.server import recorder
from foreshock.server.process_order import Arrival, arrival_of
from foreshock.server.store.schema import runs
from foreshock.server.testing import FakeRank

AHEAD, BEHIND = "1800000060000-0-aaaa", "1800000000000-0-bbbb"
"""Names of process starts on a node whose clock is right, and on one that is a minute behind."""
ORDER = {"who": "ann", "reason": "drift", "heads": [[0, 1]], "mode": "exact_delta"}


class Clock:
    """The service's clock, which may be wrong for a moment."""

    ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead


async def losses(service: Any) -> tuple[list[int], list[float]]:
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"]
    return line["steps"], line["last"]


async def who_is_ordered(service: Any, *ranks: FakeRank) -> list[str]:
    """Those of the process starts that get an order which is given now."""
    made = await service.client.post("/v1/runs/run-1/commands", json=ORDER)
    assert made.status_code == 201, made.text
    return [rank.boot for rank in ranks if (await service.store(rank, rank.sample(100))).commands]


@pytest.mark.promise("S11")
def test_a_restart_on_a_node_whose_clock_is_behind_is_shown_and_gets_its_orders(on_both: Any) -> None:
    async def story(service: Any) -> None:
        old, new = FakeRank(boot=AHEAD), FakeRank(boot=BEHIND)
        await service.store(old, old.started(), *(old.sample(step, loss=1.0) for step in (10, 20, 30)), age=500)
        await service.store(old, old.verdict(30), age=520)
        await service.store(new, new.started(step=15, policy="observe"), new.sample(20, since=15, loss=2.0), age=3)
        assert await losses(service) == ([10, 20], [1.0, 2.0])
        detail = await service.get("/v1/runs/run-1")
        assert (detail["last_step"], detail["policy"], detail["warnings"]) == (20, "observe", [])
        assert await who_is_ordered(service, old, new) == [BEHIND]

    on_both(story)


@pytest.mark.promise("S11")
@pytest.mark.parametrize("dead_first", [True, False])
def test_what_a_successor_sends_from_a_spool_never_outranks_the_process_that_lives(
    on_both: Any, dead_first: bool
) -> None:
    """The dead one was never heard while it lived, and the clock of its node was ahead."""

    async def story(service: Any) -> None:
        first, dead, living = FakeRank(boot="1799999000000-0-0000"), FakeRank(boot=AHEAD), FakeRank(boot=BEHIND)
        await service.store(first, first.started(), first.sample(5, since=0), first.sample(20, since=5), age=900)

        async def replay() -> None:
            await service.store(dead, dead.started(step=10), dead.sample(20, since=10), age=8, replayed=True)
            await service.store(dead, dead.sample(30, since=20, loss=9.0), age=9, replayed=True)

        if dead_first:
            await replay()
        await service.store(living, living.started(step=20), living.sample(25, since=20), age=8)
        if not dead_first:
            await replay()
        assert await losses(service) == ([5, 20, 25], [3.0, 3.0, 3.0])
        assert await who_is_ordered(service, first, dead, living) == [BEHIND]

    on_both(story)


async def test_a_process_that_speaks_for_itself_after_others_sent_its_spool_is_listened_to(service: Any) -> None:
    old, new = FakeRank(boot=AHEAD), FakeRank(boot=BEHIND)
    await service.store(old, old.started(), old.sample(20, since=0), age=500)
    await service.store(new, new.started(step=20), age=10, replayed=True)
    assert await who_is_ordered(service, old) == [AHEAD]
    await service.store(new, new.sample(30, since=20), age=11)
    assert await who_is_ordered(service, old, new) == [BEHIND]


async def test_a_spool_that_is_replayed_after_the_clock_was_ahead_stays_before_its_successor(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    dead, next_one, living = (FakeRank(boot=f"180000000{number}000-0-dddd") for number in (3, 2, 1))
    await service.store(next_one, next_one.started(step=10), next_one.sample(30, since=10, loss=2.0), age=500)
    clock.ahead = 3600.0
    await service.store(living, living.started(step=20), living.sample(30, since=20, loss=3.0), age=1)
    clock.ahead = 0.0
    events = dead.started(), *(dead.sample(step, since=step - 5, loss=1.0) for step in (5, 10, 15, 20))
    await service.store(dead, *events, age=1000, replayed=True)
    assert await losses(service) == ([5, 10, 30], [1.0, 1.0, 3.0])


@pytest.mark.promise("S16")
async def test_a_process_without_an_age_that_was_heard_is_not_taken_for_dead_when_its_spool_comes(service: Any) -> None:
    old, living = (FakeRank(boot=f"16000000{number}0000-0-aaaa") for number in (10, 20))
    await service.store(old, old.started(), old.sample(20, since=0, loss=1.0))
    await service.store(living, living.started(step=10), living.sample(20, since=10, loss=2.0))
    await service.store(living, living.sample(30, since=20, loss=2.0), age=1, replayed=True)
    assert await losses(service) == ([20, 30], [2.0, 2.0])
    assert await who_is_ordered(service, old, living) == [living.boot]


@pytest.mark.promise("S5")
@pytest.mark.parametrize("age", ["soon", "-1", "nan", "inf", "1e308", "9" * 400, "\u0660", ""])
async def test_a_senseless_age_is_not_taken_and_costs_no_batch(service: Any, age: str) -> None:
    assert arrival_of({AGE_HEADER: age.encode().decode("latin-1")}) == Arrival()  # as a server reads it
    rank = FakeRank()
    headers = {"content-type": "application/json", "foreshock-process-age": age.encode()}
    batch = rank.batch(rank.started()).model_dump_json()
    assert (await service.client.post("/v1/batches", content=batch, headers=headers)).status_code == 200
    assert await who_is_ordered(service, rank) == ["b1"]


# ---- a run that is resumed with fewer ranks -------------------------------------------------------------------------


# ---- a run that the service has forgotten ---------------------------------------------------------------------------


@pytest.mark.promise("S16")
def test_a_run_that_was_deleted_while_it_trains_asks_its_agent_what_it_watches(on_both: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        assert not (await service.store(rank, rank.started(), age=1)).send_started
        assert not (await service.store(rank, rank.sample(1), age=2)).send_started
        with service.app.state.store.writer.engine.begin() as connection:
            connection.execute(runs.delete())
        assert (await service.store(rank, rank.sample(2), age=3)).send_started
        assert (await service.get("/v1/runs/run-1"))["layers"] == []
        assert not (await service.store(rank, rank.started(), rank.sample(3), age=4)).send_started
        assert not (await service.store(rank, rank.started(), rank.sample(4), age=5)).send_started
        detail = await service.get("/v1/runs/run-1")
        assert (len(detail["layers"]), detail["policy"], detail["last_step"]) == (2, "auto", 4)
        told = (await service.get("/v1/runs/run-1/events", kind="started"))["events"]
        assert len(told) == 1, "it is told once, however often it is said"

    on_both(story)
