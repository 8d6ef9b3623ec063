"""An order that nobody is left to carry out is refused at once: when it is given, or when the last rank ends."""

from typing import Any

import pytest
from tests.server.orders import local, order, start, state_of

from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank

WHO = {"who": "ann", "reason": "too late"}


async def end(service: Any, *ranks: FakeRank, status: Any = "completed") -> None:
    for rank in ranks:
        await service.store(rank, Finished(step=30, unix_seconds=30.0, status=status))


@pytest.mark.parametrize(
    ("status", "heads", "named"), [("completed", [[0, 2]], "layer 0 head 2"), ("stopped", None, "every head")]
)
async def test_an_order_to_a_run_that_has_ended_is_refused_at_once(
    service: Any, status: Any, heads: list[list[int]] | None, named: str
) -> None:
    ranks = FakeRank(), FakeRank(rank=1)
    await start(service, *ranks)
    await end(service, *ranks, status=status)
    refused = await order(service, heads=heads)
    assert refused.status_code == 409
    told = f"Could not switch {named}: all ranks of run run-1 that have them ended."
    assert refused.json()["detail"] == f"{told} Order it again when the run is resumed."
    assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []


async def test_an_order_to_ranks_that_have_ended_is_refused_while_others_train(service: Any) -> None:
    gone, lives = FakeRank(layers=1), FakeRank(rank=1, layers=2)
    lives.layers = lives.layers[1:]
    await start(service, gone, lives)
    await end(service, gone)
    refused = await order(service, heads=[[0, 2]])
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "Could not switch layer 0 head 2: all ranks of run run-1 that have them ended. "
        "Order it again when the run is resumed.",
    )
    assert (await order(service, heads=[[1, 2]])).status_code == 201
    assert (await order(service, heads=[[0, 2], [1, 0]])).status_code == 201, "somebody holds one of them"


async def test_a_resumed_run_takes_orders_and_an_order_sent_again_is_the_first_one(service: Any) -> None:
    rank, resumed = FakeRank(boot="b1"), FakeRank(boot="b2")
    await start(service, rank)
    first = await order(service, key="k")
    await end(service, rank)
    again = await order(service, key="k")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert (await order(service)).status_code == 409
    await start(service, resumed)
    assert (await order(service)).status_code == 201


async def test_a_proposal_to_a_run_that_has_ended_can_be_rejected_and_not_approved(service: Any) -> None:
    rank = FakeRank()
    await start(service, rank, policy="approve")
    await service.store(rank, rank.verdict(10), local("proposed"))
    [proposed] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    await end(service, rank)
    refused = await service.client.post(f"/v1/commands/{proposed['id']}/approve", json=WHO)
    assert refused.status_code == 409
    assert "Could not switch layer 0 head 2: all ranks" in refused.json()["detail"]
    assert await state_of(service, proposed["id"]) == "proposed"
    rejected = await service.client.post(f"/v1/commands/{proposed['id']}/reject", json=WHO)
    assert (rejected.status_code, rejected.json()["state"]) == (200, "rejected")


async def test_a_switch_of_a_run_that_has_ended_is_not_undone(service: Any) -> None:
    rank = FakeRank()
    await start(service, rank)
    await order(service)
    [command] = (await service.store(rank, rank.sample(1))).commands
    await service.store(rank, rank.answer(command, 2))
    await end(service, rank)
    refused = await service.client.post(f"/v1/commands/{command.id}/undo", json=WHO)
    assert refused.status_code == 409
    assert "Could not switch layer 0 head 2: all ranks" in refused.json()["detail"]


async def test_a_run_of_which_nobody_knows_whether_it_lives_takes_orders(service: Any) -> None:
    gone, silent = FakeRank(), FakeRank(rank=1)
    await start(service, gone, silent)
    await end(service, gone)
    assert (await order(service)).status_code == 201


# ---- an order that is under way when its run ends --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "delivered", "heads", "named"),
    [("completed", False, [[0, 2]], "layer 0 head 2"), ("failed", True, None, "every head")],
)
async def test_an_order_under_way_is_refused_with_the_reason_when_the_last_rank_ends(
    service: Any, status: Any, delivered: bool, heads: Any, named: str
) -> None:
    ranks = FakeRank(), FakeRank(rank=1)
    await start(service, *ranks)
    command = (await order(service, heads=heads)).json()["id"]
    if delivered:
        assert (await service.store(ranks[0], ranks[0].sample(1))).commands
    await end(service, ranks[0], status=status)
    assert await state_of(service, command) == ("delivered" if delivered else "pending"), "rank 1 may answer"
    assert (await service.get(f"/v1/commands/{command}"))["closed_because"] is None
    await end(service, ranks[1], status=status)
    shown = await service.get(f"/v1/commands/{command}")
    assert (shown["state"], shown["closed_because"]) == (
        "refused",
        f"Could not switch {named}: all ranks that have them ended before they answered. "
        "Order it again when the run is resumed.",
    )
    [event, *_] = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    assert event["sentence"] == (f"Command to switch {named} to exact_delta is refused: {shown['closed_because']}")
    newest = next(row for row in (await service.get("/v1/audit"))["rows"] if row["command"] == command)
    assert (newest["actor"], newest["details"]["state"]) == ("service", "refused")
    assert newest["details"]["because"] == shown["closed_because"]


async def test_an_order_that_was_answered_before_the_end_or_with_it_is_as_it_was_answered(service: Any) -> None:
    quick, other = FakeRank(), FakeRank(rank=1)
    await start(service, quick, other)
    await order(service)
    [command] = (await service.store(quick, quick.sample(1))).commands
    await service.store(quick, quick.answer(command, 2), Finished(step=2, unix_seconds=2.0, status="completed"))
    assert await state_of(service, command.id) == "delivered", "rank 1 may answer"
    await end(service, other)
    shown = await service.get(f"/v1/commands/{command.id}")
    assert (shown["state"], shown["closed_because"]) == ("applied", None)


async def test_an_answer_that_comes_after_the_end_tells_the_truth(service: Any) -> None:
    rank = FakeRank()
    await start(service, rank)
    await order(service)
    [command] = (await service.store(rank, rank.sample(1))).commands
    await end(service, rank)
    assert await state_of(service, command.id) == "refused"
    await service.store(rank, rank.answer(command, 2))
    shown = await service.get(f"/v1/commands/{command.id}")
    assert (shown["state"], shown["closed_because"]) == ("applied", None)


async def test_an_order_is_refused_when_the_end_comes_late_from_a_spool(service: Any) -> None:
    """The service was away when the run ended; a later process sends what the run left behind."""
    rank = FakeRank()
    await service.store(rank, rank.started(), age=1)
    command = (await order(service)).json()["id"]
    await service.store(rank, Finished(step=9, unix_seconds=9.0, status="completed"), age=100, replayed=True)
    assert await state_of(service, command) == "refused"


async def test_an_order_stands_for_the_process_that_goes_on_when_the_end_of_the_one_before_comes_late(
    service: Any,
) -> None:
    ended, resumed = FakeRank(boot="b1"), FakeRank(boot="b2")
    await service.store(ended, ended.started(), age=100)
    command = (await order(service)).json()["id"]
    await service.store(resumed, resumed.started(), age=1)
    await service.store(ended, Finished(step=9, unix_seconds=9.0, status="stopped"), age=102, replayed=True)
    assert await state_of(service, command) == "delivered"
    [sent] = (await service.store(resumed, resumed.sample(1), age=2)).commands
    await service.store(resumed, resumed.answer(sent, 2), age=3)
    assert await state_of(service, command) == "applied"


async def test_an_order_waits_for_heads_that_no_rank_holds_for_the_moment_and_none_has_given_up(service: Any) -> None:
    """A run is resumed in another shape: the process that takes over the head has not started yet."""
    killed, first, second = FakeRank(boot="b1"), FakeRank(boot="b2"), FakeRank(boot="b2", rank=1)
    first.layers = first.layers[1:]
    await start(service, killed)
    command = (await order(service)).json()["id"]
    await start(service, first)
    assert await state_of(service, command) == "pending"
    await start(service, second)
    assert [sent.id for sent in (await service.store(second, second.sample(1))).commands] == [command]
