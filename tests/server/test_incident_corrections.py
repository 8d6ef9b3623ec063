"""A corrected cause is one incident for people: in the list, in the log, in messages and in metrics."""

from typing import Any

from tests.server.test_notifier import Out, notifier_of

from foreshock.contract.wire import Verdict
from foreshock.server.testing import FakeRank

RUN = "/v1/runs/run-1"


def growth(rank: FakeRank, step: int, **changes: Any) -> Verdict:
    return rank.verdict(step, cause="score growth", signal="score", **changes)


def corrected(rank: FakeRank, step: int, **changes: Any) -> Verdict:
    changes = {"state": "updated", "corrected_from": "score growth", "corrected_step": step, **changes}
    return rank.verdict(step, **changes)


async def log_of(service: Any) -> list[tuple[str, str]]:
    events = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    return [(each["incident"]["cause"], each["incident"]["state"]) for each in reversed(events)]


async def test_a_corrected_cause_leaves_one_incident_that_says_so_and_an_end_of_the_old_one_in_the_log(
    service: Any,
) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="approve"), rank.sample(5), growth(rank, 5))
    await service.store(rank, rank.sample(9), corrected(rank, 9))
    [incident] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (incident["cause"], incident["opened_step"], incident["act"]) == ("rounding", 5, "propose")
    assert (incident["corrected_from"], incident["corrected_step"]) == ("score growth", 9)
    assert "until step 9 this was reported as score growth" in incident["sentence"]
    expected = [("score growth", "open"), ("rounding", "open"), ("score growth", "closed")]
    assert await log_of(service) == expected
    [short] = (await service.get(RUN))["incidents"]
    assert short["corrected_from"] == "score growth"
    assert (await service.get(RUN))["warnings"][0]["corrected_step"] == 9
    await service.store(rank, rank.sample(10), corrected(rank, 10, corrected_step=9))
    assert await log_of(service) == expected


async def test_growth_that_comes_after_a_correction_joins_the_one_incident_and_is_told(service: Any) -> None:
    rank = FakeRank(heads=(0, 1, 2))
    await service.store(rank, rank.started(), rank.sample(5), growth(rank, 5))
    await service.store(rank, rank.sample(9), corrected(rank, 9))
    await service.store(rank, rank.sample(12), growth(rank, 12, head=1, name="warn-2"))
    assert (await log_of(service))[-1] == ("rounding", "open")
    [found] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (found["id"], found["causes"], found["standing"]) == ("rounding", ["rounding", "score growth"], 2)
    [short] = (await service.get(RUN))["incidents"]
    assert short["causes"] == found["causes"]


async def test_people_are_sent_one_message_of_a_correction_which_says_what_was_told_before(service: Any) -> None:
    out, rank = Out(), FakeRank()
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), growth(rank, 5))
    await notifier.turn()
    await service.store(rank, rank.sample(9), corrected(rank, 9))
    await notifier.turn()
    await notifier.turn()
    first, second = out.said
    assert "Corrected" not in first
    assert "To do: Lower the learning rate" in first
    assert "Corrected: until step 9 this was reported as score growth." in second
    assert "To do: Switch every head" in second


async def test_metrics_say_what_an_incident_was_told_as_before(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), growth(rank, 5))
    assert "foreshock_incident_corrected_step{" not in (await service.client.get("/metrics")).text
    await service.store(rank, rank.sample(9), corrected(rank, 9))
    lines = (await service.client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith(("foreshock_incident_cor", "foreshock_incident_active"))]
    assert sorted(told) == [
        'foreshock_incident_active{act="none",cause="rounding",run="run-1",severity="warning",state="open"} 1.0',
        'foreshock_incident_corrected_step{cause="rounding",run="run-1",was="score growth"} 9.0',
    ]
