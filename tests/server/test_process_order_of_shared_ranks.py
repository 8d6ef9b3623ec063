"""Two living processes that call themselves one rank are named; a restart, however long its spool, is not."""

import time
from typing import Any

import pytest

from foreshock.contract.wire import Finished
from foreshock.server import recorder
from foreshock.server.runs.eventlog import shared_sentence
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("A18")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service's clock, which a story may put forward."""

    class Clock:
        ahead = 0.0

        def time(self) -> float:
            return time.time() + self.ahead

    made = Clock()
    monkeypatch.setattr(recorder, "time", made)
    return made


async def told(service: Any) -> list[str]:
    events = (await service.get("/v1/runs/run-1/events", kind="started"))["events"]
    return [event["sentence"] for event in events if "living processes" in event["sentence"]]


async def shown(service: Any) -> list[str | None]:
    [listed] = (await service.get("/v1/runs"))["runs"]
    return [listed["shared_ranks"], (await service.get("/v1/runs/run-1"))["shared_ranks"]]


async def both_start(service: Any, *ranks: FakeRank) -> None:
    for second, rank in enumerate(ranks):
        await service.store(rank, rank.started(), age=len(ranks) - second)


async def test_processes_that_share_a_rank_are_named_once_in_the_log_and_in_every_answer(
    service: Any, clock: Any
) -> None:
    ranks = [FakeRank(rank=rank, boot=boot) for rank in (0, 3) for boot in ("a", "b")]
    await both_start(service, *ranks, FakeRank(rank=1, boot="c"))
    assert await shown(service) == [None] * 2
    for number in range(1, 4):
        clock.ahead = 40.0 * number
        for rank in ranks:
            await service.store(rank, rank.sample(number), age=clock.ahead + 5)
    assert await shown(service) == [shared_sentence([0, 3])] * 2
    assert sorted(await told(service)) == [shared_sentence([0]), shared_sentence([3])]


@pytest.mark.parametrize("end", ["dies", "finishes", "is sent from its spool", "says its last words late"])
async def test_a_process_that_was_restarted_shares_its_rank_with_nobody(service: Any, clock: Any, end: str) -> None:
    old, new = FakeRank(boot="a"), FakeRank(boot="b")
    await service.store(old, old.started(), old.sample(1), age=1000)
    await service.store(new, new.started(step=1), age=1)
    if end == "says its last words late":
        clock.ahead = 20.0
        await service.store(old, old.sample(2), age=1022)
    if end == "finishes":
        clock.ahead = 40.0
        await service.store(old, old.sample(2), Finished(step=2, unix_seconds=1.0, status="stopped"), age=1042)
    for number in range(1, 4):
        clock.ahead = 40.0 * number
        await service.store(new, new.sample(number + 1), age=clock.ahead + 1)
        if end == "is sent from its spool":
            await service.store(old, old.sample(number + 5), age=1000 + clock.ahead, replayed=True)
    assert await shown(service) == [None] * 2
    assert await told(service) == []
