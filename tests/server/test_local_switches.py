"""What a rank switched by itself: the others that hold the head follow, and its words are believed within bounds."""

from typing import Any

import pytest
from tests.server.orders import local, start

from foreshock.server.testing import FakeRank


@pytest.mark.promise("S11")
async def test_a_local_switch_is_passed_on_to_the_other_ranks_that_hold_the_head(service: Any) -> None:
    first, second, third = FakeRank(rank=0), FakeRank(rank=1), FakeRank(rank=2)
    other = FakeRank(rank=3, heads=(3, 4))
    await start(service, first, second, third, other)
    batch = first.batch(first.verdict(20), local("applied"))
    assert (await service.post(batch)).json()["commands"] == []
    assert (await service.post(batch)).json()["commands"] == []
    for rank in (second, third):
        [command] = (await service.store(rank, rank.sample(21))).commands
        assert (command.heads, command.mode) == (((0, 2),), "exact_delta")
        await service.store(rank, rank.answer(command, 22))
    assert (await service.store(other, other.sample(21))).commands == ()
    assert (await service.store(first, first.sample(23))).commands == ()
    [shown] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert (shown["state"], shown["source"], shown["issued_by"]) == ("applied", "rank", "rank 0")


async def test_a_mode_of_a_newer_agent_is_told_and_kept_and_no_other_rank_is_ordered_or_refused(service: Any) -> None:
    first, second = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, first, second)
    newer = local("applied").model_copy(update={"after": ("of_tomorrow",)})
    await service.store(first, newer)
    for step in (21, 22):
        assert (await service.store(second, second.sample(step))).commands == ()
    assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []
    [told] = (await service.get("/v1/runs/run-1/events", kind="switched"))["events"]
    assert told["switched"]["after"] == ["of_tomorrow"]
    back = local("applied", "local-2", 25).model_copy(update={"before": ("of_tomorrow",)})
    await service.store(first, back)
    [proposal] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert proposal["state"] == "proposed"  # nobody knows whether the warning called for that
    decision = {"who": "ann", "reason": "agreed"}
    await service.client.post(f"/v1/commands/{proposal['id']}/approve", json=decision)
    [sent] = (await service.store(second, second.sample(26))).commands
    await service.store(second, second.answer(sent, 27))
    [shown] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    undone = await service.client.post(
        f"/v1/commands/{shown['id']}/undo", json={"who": "ann", "reason": "it cost too much"}
    )
    assert undone.status_code == 409
    assert "was of_tomorrow, which this service cannot order" in undone.json()["detail"]


@pytest.mark.parametrize("name", ["no such mode", "x" * 65, "<b>", "plain\n"])
async def test_a_report_of_what_cannot_be_a_mode_is_refused_with_a_sentence(service: Any, name: str) -> None:
    rank = FakeRank()
    for event in (
        rank.started().model_copy(update={"mitigation": name}),
        local("applied").model_copy(update={"after": (name,)}),
    ):
        refused = await service.post(rank.batch(event))
        assert refused.status_code == 422
        assert "String should" in refused.json()["errors"][0]["message"]
