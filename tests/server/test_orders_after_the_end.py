"""An order that nobody is left to carry out is refused at once: the ranks that hold its heads have ended."""

from typing import Any

import pytest
from tests.server.orders import local, order, start, state_of

from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank

WHO = {"who": "ann", "reason": "too late"}


async def end(service: Any, *ranks: FakeRank, status: Any = "completed") -> None:
    for rank in ranks:
        await service.store(rank, Finished(step=30, unix_seconds=30.0, status=status))


@pytest.mark.parametrize("status", ["completed", "failed", "stopped"])
@pytest.mark.parametrize(("heads", "named"), [([[0, 2]], "layer 0 head 2"), (None, "every head")])
def test_an_order_to_a_run_that_has_ended_is_refused_at_once(
    play: Any, status: Any, heads: list[list[int]] | None, named: str
) -> None:
    async def story(service: Any) -> None:
        ranks = FakeRank(), FakeRank(rank=1)
        await start(service, *ranks)
        await end(service, *ranks, status=status)
        refused = await order(service, heads=heads)
        assert refused.status_code == 409
        assert refused.json()["detail"] == (
            f"Run run-1 has ended, and nobody is left to switch {named}. Order it again when the run is resumed."
        )
        assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []

    play(story)


def test_an_order_to_ranks_that_have_ended_is_refused_while_others_train(play: Any) -> None:
    async def story(service: Any) -> None:
        gone, lives = FakeRank(layers=1), FakeRank(rank=1, layers=2)
        lives.layers = lives.layers[1:]
        await start(service, gone, lives)
        await end(service, gone)
        refused = await order(service, heads=[[0, 2]])
        assert (refused.status_code, refused.json()["detail"]) == (
            409,
            "Every rank of run run-1 that holds layer 0 head 2 has ended, and nobody is left to switch it. "
            "Order it again when the run is resumed.",
        )
        assert (await order(service, heads=[[1, 2]])).status_code == 201
        assert (await order(service, heads=[[0, 2], [1, 0]])).status_code == 201, "somebody holds one of them"

    play(story)


def test_a_resumed_run_takes_orders_and_an_order_sent_again_is_the_first_one(play: Any) -> None:
    async def story(service: Any) -> None:
        rank, resumed = FakeRank(boot="b1"), FakeRank(boot="b2")
        await start(service, rank)
        first = await order(service, key="k")
        await end(service, rank)
        again = await order(service, key="k")
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        assert (await order(service)).status_code == 409
        await start(service, resumed)
        assert (await order(service)).status_code == 201

    play(story)


def test_a_proposal_to_a_run_that_has_ended_can_be_rejected_and_not_approved(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await start(service, rank, policy="approve")
        await service.store(rank, rank.verdict(10), local("proposed"))
        [proposed] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        await end(service, rank)
        refused = await service.client.post(f"/v1/commands/{proposed['id']}/approve", json=WHO)
        assert refused.status_code == 409
        assert "has ended, and nobody is left to switch layer 0 head 2" in refused.json()["detail"]
        assert await state_of(service, proposed["id"]) == "proposed"
        rejected = await service.client.post(f"/v1/commands/{proposed['id']}/reject", json=WHO)
        assert (rejected.status_code, rejected.json()["state"]) == (200, "rejected")

    play(story)


def test_a_switch_of_a_run_that_has_ended_is_not_undone(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await start(service, rank)
        await order(service)
        [command] = (await service.store(rank, rank.sample(1))).commands
        await service.store(rank, rank.answer(command, 2))
        await end(service, rank)
        refused = await service.client.post(f"/v1/commands/{command.id}/undo", json=WHO)
        assert refused.status_code == 409
        assert "nobody is left to switch layer 0 head 2" in refused.json()["detail"]

    play(story)


def test_a_run_of_which_nobody_knows_whether_it_lives_takes_orders(play: Any) -> None:
    async def story(service: Any) -> None:
        gone, silent = FakeRank(), FakeRank(rank=1)
        await start(service, gone, silent)
        await end(service, gone)
        assert (await order(service)).status_code == 201

    play(story)
