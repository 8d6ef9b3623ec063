"""A corrected cause is one incident for people: in the list, in the log, in messages and in metrics."""

from typing import Any

from tests.server.test_notifier import Out, notifier_of

from foreshock.contract.wire import Verdict
from foreshock.server.testing import FakeRank

RUN = "/v1/runs/run-1"


def growth(rank: FakeRank, step: int, **changes: Any) -> Verdict:
    return rank.verdict(step, cause="score growth", signal="score", **changes)


def corrected(rank: FakeRank, step: int) -> Verdict:
    return rank.verdict(step, state="updated", corrected_from="score growth", corrected_step=9)


async def log_of(service: Any) -> list[tuple[str, str]]:
    events = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    return [(each["incident"]["cause"], each["incident"]["state"]) for each in reversed(events)]


async def test_a_corrected_cause_leaves_one_incident_that_says_so_and_growth_that_comes_later_joins_it(
    service: Any,
) -> None:
    out, rank = Out(), FakeRank(heads=(0, 1, 2))
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), growth(rank, 5))
    await notifier.turn()
    assert "foreshock_incident_corrected_step{" not in (await service.client.get("/metrics")).text
    await service.store(rank, rank.sample(9), corrected(rank, 9))
    for _ in range(2):
        await notifier.turn()
    [incident] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (incident["cause"], incident["opened_step"], incident["ask"]) == ("rounding", 5, "switch")
    assert (incident["corrected_from"], incident["corrected_step"]) == ("score growth", 9)
    assert "until step 9 this was reported as score growth" in incident["sentence"]
    detail = await service.get(RUN)
    assert [one["corrected_from"] for one in detail["incidents"]] == ["score growth"]
    assert detail["warnings"][0]["corrected_step"] == 9
    first, second = out.said
    assert ("Corrected" in first, "To do: Lower the learning rate" in first) == (False, True)
    assert "Corrected: until step 9 this was reported as score growth." in second
    assert "To do: Switch every head" in second
    lines = (await service.client.get("/metrics")).text.splitlines()
    assert sorted(one for one in lines if one.startswith(("foreshock_incident_cor", "foreshock_incident_active"))) == [
        'foreshock_incident_active{act="none",cause="rounding",run="run-1",severity="warning",state="open"} 1.0',
        'foreshock_incident_corrected_step{cause="rounding",run="run-1",was="score growth"} 9.0',
    ]
    log = [("score growth", "open"), ("rounding", "open"), ("score growth", "closed")]
    assert await log_of(service) == log
    await service.store(rank, rank.sample(10), corrected(rank, 10))
    assert await log_of(service) == log
    await service.store(rank, rank.sample(12), growth(rank, 12, head=1, name="warn-2"))
    assert await log_of(service) == [*log, ("rounding", "open")]
    [found] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (found["id"], found["causes"], found["standing"]) == ("rounding", ["rounding", "score growth"], 2)
    assert (await service.get(RUN))["incidents"][0]["causes"] == found["causes"]
