"""The current process of each rank, for any clocks of the nodes and any order of the batches."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from foreshock.contract.wire import AGE_HEADER, Finished
from foreshock.server import recorder
from foreshock.server.process_order import Arrival, arrival_of
from foreshock.server.runs.eventlog import shared_sentence
from foreshock.server.store.schema import boots, runs
from foreshock.server.testing import FakeRank

CORRECT_CLOCK, SLOW_CLOCK = "1800000060000-0-aaaa", "1800000000000-0-bbbb"
"""Boot ids of a node with a correct clock and of a node whose clock is a minute slow."""
ORDER = {"who": "ann", "reason": "drift", "heads": [[0, 1]], "mode": "exact_delta"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock of the service, which a test may move forward."""

    class Clock:
        ahead = 0.0

        def time(self) -> float:
            return time.time() + self.ahead

    made = Clock()
    monkeypatch.setattr(recorder, "time", made)
    return made


async def losses(service: Any) -> tuple[list[int], list[float]]:
    [line] = (await service.get("/v1/runs/run-1/curves", line="run.loss"))["lines"]
    return line["steps"], line["last"]


async def boots_with_order(service: Any, *ranks: FakeRank) -> list[str]:
    """Send an order and return the boot ids of the ranks that receive it."""
    made = await service.client.post("/v1/runs/run-1/commands", json=ORDER)
    assert made.status_code == 201, made.text
    return [rank.boot for rank in ranks if (await service.store(rank, rank.sample(100))).commands]


@pytest.mark.promise("S11")
@pytest.mark.usefixtures("both_databases")
async def test_restart_on_node_with_slow_clock_is_shown_and_gets_orders(service: Any) -> None:
    old, new = FakeRank(boot=CORRECT_CLOCK), FakeRank(boot=SLOW_CLOCK)
    await service.store(old, old.started(), *(old.sample(step, loss=1.0) for step in (10, 20, 30)), age=500)
    await service.store(old, old.verdict(30), age=520)
    await service.store(new, new.started(step=15, policy="observe"), new.sample(20, since=15, loss=2.0), age=3)
    assert await losses(service) == ([10, 20], [1.0, 2.0])
    detail = await service.get("/v1/runs/run-1")
    assert (detail["last_step"], detail["policy"], detail["warnings"]) == (20, "observe", [])
    assert await boots_with_order(service, old, new) == [SLOW_CLOCK]


@pytest.mark.promise("S11")
@pytest.mark.parametrize("dead_first", [True, False])
@pytest.mark.usefixtures("both_databases")
async def test_spool_of_dead_process_never_outranks_running_process(service: Any, dead_first: bool) -> None:
    """The dead process never reached the service while it ran, and the clock of its node was fast."""

    first, dead, living = FakeRank(boot="1799999000000-0-0000"), FakeRank(boot=CORRECT_CLOCK), FakeRank(boot=SLOW_CLOCK)
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
    assert await boots_with_order(service, first, dead, living) == [SLOW_CLOCK]


async def test_process_that_sends_after_its_spool_was_replayed_becomes_current(service: Any) -> None:
    old, new = FakeRank(boot=CORRECT_CLOCK), FakeRank(boot=SLOW_CLOCK)
    await service.store(old, old.started(), old.sample(20, since=0), age=500)
    await service.store(new, new.started(step=20), age=10, replayed=True)
    assert await boots_with_order(service, old) == [CORRECT_CLOCK]
    await service.store(new, new.sample(30, since=20), age=11)
    assert await boots_with_order(service, old, new) == [SLOW_CLOCK]


async def test_replayed_spool_stays_before_successor_despite_clock_jump(service: Any, clock: Any) -> None:
    dead, next_one, living = (FakeRank(boot=f"180000000{number}000-0-dddd") for number in (3, 2, 1))
    await service.store(next_one, next_one.started(step=10), next_one.sample(30, since=10, loss=2.0), age=500)
    clock.ahead = 3600.0
    await service.store(living, living.started(step=20), living.sample(30, since=20, loss=3.0), age=1)
    clock.ahead = 0.0
    events = dead.started(), *(dead.sample(step, since=step - 5, loss=1.0) for step in (5, 10, 15, 20))
    await service.store(dead, *events, age=1000, replayed=True)
    assert await losses(service) == ([5, 10, 30], [1.0, 1.0, 3.0])


@pytest.mark.promise("S16")
async def test_process_without_age_header_stays_current_after_spool_replay(service: Any) -> None:
    old, living = (FakeRank(boot=f"16000000{number}0000-0-aaaa") for number in (10, 20))
    await service.store(old, old.started(), old.sample(20, since=0, loss=1.0))
    await service.store(living, living.started(step=10), living.sample(20, since=10, loss=2.0))
    await service.store(living, living.sample(30, since=20, loss=2.0), age=1, replayed=True)
    assert await losses(service) == ([20, 30], [2.0, 2.0])
    assert await boots_with_order(service, old, living) == [living.boot]


@pytest.mark.promise("S27")
async def test_each_restart_on_fewer_ranks_discards_later_steps_of_first_launch(
    service: Any,
) -> None:
    for rank in (FakeRank(rank=number, boot="a") for number in range(2)):
        taken = (rank.sample(step, since=step - 40, loss=1.0) for step in (40, 80, 120))
        await service.store(rank, rank.started(world_size=2), *taken, age=100)
    for boot, step, age, counted in (("b", 80, 50, [40, 80, 90]), ("c", 40, 10, [40, 50])):
        again = FakeRank(boot=boot)
        began = again.started(step=step, world_size=1)
        await service.store(again, began, again.sample(step + 10, since=step, loss=2.0), age=age)
        assert await losses(service) == (counted, [1.0] * (len(counted) - 1) + [2.0])


@pytest.mark.promise("S5")
async def test_invalid_process_age_is_ignored_and_batch_is_stored(service: Any, rank: FakeRank) -> None:
    for age in ("soon", "-1", "nan", "inf", "1e308", "9" * 400, "\u0660", ""):
        assert arrival_of({AGE_HEADER: age.encode().decode("latin-1")}) == Arrival()  # headers are decoded as Latin-1
        headers = {"content-type": "application/json", "foreshock-process-age": age.encode()}
        batch = rank.batch(rank.started()).model_dump_json()
        assert (await service.client.post("/v1/batches", content=batch, headers=headers)).status_code == 200, age
    assert await boots_with_order(service, rank) == ["b1"]


@pytest.mark.promise("S16")
@pytest.mark.usefixtures("both_databases")
async def test_run_deleted_while_training_requests_start_event_again(service: Any, rank: FakeRank) -> None:
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
    events = (await service.get("/v1/runs/run-1/events", kind="started"))["events"]
    assert len(events) == 1, "a repeated start event must be logged once"


async def shared_rank_events(service: Any) -> list[str]:
    events = (await service.get("/v1/runs/run-1/events", kind="started"))["events"]
    return [event["sentence"] for event in events if "running processes use rank" in event["sentence"]]


async def shared_ranks_shown(service: Any) -> list[str | None]:
    [listed] = (await service.get("/v1/runs"))["runs"]
    return [listed["shared_ranks"], (await service.get("/v1/runs/run-1"))["shared_ranks"]]


async def start_all(service: Any, *ranks: FakeRank) -> None:
    for second, rank in enumerate(ranks):
        await service.store(rank, rank.started(), age=len(ranks) - second)


@pytest.mark.promise("A18")
async def test_processes_sharing_a_rank_are_logged_once_and_shown(service: Any, clock: Any) -> None:
    ranks = [FakeRank(rank=rank, boot=boot) for rank in (0, 3) for boot in ("a", "b")]
    await start_all(service, *ranks, FakeRank(rank=1, boot="c"))
    assert await shared_ranks_shown(service) == [None] * 2
    for number in range(1, 4):
        clock.ahead = 40.0 * number
        for rank in ranks:
            await service.store(rank, rank.sample(number), age=clock.ahead + 5)
    assert await shared_ranks_shown(service) == [shared_sentence([0, 3])] * 2
    assert sorted(await shared_rank_events(service)) == [shared_sentence([0]), shared_sentence([3])]


@pytest.mark.parametrize("end", ["dies", "finishes", "spool is replayed", "last batch is late"])
@pytest.mark.promise("A18")
async def test_restarted_process_is_not_reported_as_sharing_its_rank(service: Any, clock: Any, end: str) -> None:
    old, new = FakeRank(boot="a"), FakeRank(boot="b")
    await service.store(old, old.started(), old.sample(1), age=1000)
    await service.store(new, new.started(step=1), age=1)
    if end == "last batch is late":
        clock.ahead = 20.0
        await service.store(old, old.sample(2), age=1022)
    if end == "finishes":
        clock.ahead = 40.0
        await service.store(old, old.sample(2), Finished(step=2, unix_seconds=1.0, status="stopped"), age=1042)
    for number in range(1, 4):
        clock.ahead = 40.0 * number
        await service.store(new, new.sample(number + 1), age=clock.ahead + 1)
        if end == "spool is replayed":
            await service.store(old, old.sample(number + 5), age=1000 + clock.ahead, replayed=True)
    assert await shared_ranks_shown(service) == [None] * 2
    assert await shared_rank_events(service) == []


Start = tuple[int, int | None, int | None]
"""Rank, world size and first step of a process, each None if unknown."""


def repeats_steps(later: Sequence[Start], earlier: Start) -> bool:
    """Whether the last process of `later` repeats steps of `earlier`.

    It does if it has the same rank, or if a launch with another world size has started since.
    """
    worlds = {world for _, world, _ in (earlier, *later) if world is not None}
    return later[-1][0] == earlier[0] or len(worlds) > 1


def start_of(row: Any) -> Start:
    return row.rank, row.world_size, row.started_step if row.started_step is not None else row.earliest_step


@pytest.mark.promise("S2")
@pytest.mark.promise("S27")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
async def test_process_order_matches_reference_for_random_arrivals(service: Any, seed: int, ranks: int) -> None:
    """After every batch, the stored order equals the order computed from all processes of the run at once."""
    draw = random.Random(seed)
    starts = [
        FakeRank(boot=f"{1_800_000_000_000 + draw.randrange(9000)}-{n}-aaaa", rank=draw.randrange(ranks))
        for n in range(12)
    ]
    worlds = [draw.choice([ranks, ranks, ranks + 1]) for _ in starts]
    for number in range(60):
        which = draw.randrange(2 + number // 6)
        step = draw.randrange(100)
        event = (
            starts[which].started(step=step, world_size=worlds[which])
            if draw.random() < 0.4
            else starts[which].sample(step + 1, since=draw.randrange(step + 1))
        )
        age = draw.choice([None, draw.uniform(0, 9000)])
        await service.store(starts[which], event, age=age, replayed=draw.random() < 0.3)
        with service.app.state.store.reader.engine.begin() as connection:
            known = connection.execute(select(boots).order_by(boots.c.place)).all()
        living = [row for row in known if not row.replayed] or known
        newest = []
        for i, row in enumerate(living):
            later = [start_of(one) for one in living[i + 1 :]]
            if not any(repeats_steps(later[: n + 1], start_of(row)) for n in range(len(later))):
                newest.append(row)
        order = [row for row in known if row not in newest] + newest
        for i, row in enumerate(order):
            assert row.newest == (row in newest), (number, row)
            later = [] if row in newest else [start_of(one) for one in order[i + 1 :]]
            first = [last[2] for n, last in enumerate(later) if repeats_steps(later[: n + 1], start_of(row))]
            assert row.until_step == min((step for step in first if step is not None), default=None), (number, row)
