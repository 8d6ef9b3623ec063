"""Orders are created once, refused where they are wrong, decided once, and every transition is audited."""

from typing import Any

import pytest
from tests.server.orders import local, order, start

from foreshock.contract.wire import Command
from foreshock.server.testing import FakeRank


@pytest.mark.promise("S11")
async def test_every_transition_stands_in_the_audit_trail_and_the_chain_shows_a_change(service: Any) -> None:
    rank = FakeRank()
    await start(service, rank)
    await order(service)
    [command] = (await service.store(rank, rank.sample(10))).commands
    await service.store(rank, rank.answer(command, 11))
    page = await service.get("/v1/audit")
    told = [(row["actor"], row["details"].get("state", row["action"])) for row in reversed(page["rows"])]
    assert told == [
        ("ann (local)", "pending"),
        ("service", "delivered"),
        ("rank 0", "answer"),
        ("service", "applied"),
    ]
    answer = page["rows"][1]["details"]
    assert (answer["before"], answer["after"]) == (["plain"], ["exact_delta"])


async def test_an_idempotency_key_orders_once_and_refuses_another_order(service: Any) -> None:
    await start(service, FakeRank())
    first, second = await order(service, "k1"), await order(service, "k1")
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    assert (await order(service, "k1", mode="paper_softmax")).status_code == 409
    assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"mode": "faster"}, 422),
        ({"expect": "slower"}, 422),
        ({"heads": []}, 422),
        ({"heads": [[7, 7]]}, 422),
        ({"heads": [[0]]}, 422),
        ({"reason": ""}, 422),
        ({"expires_in_seconds": -1}, 422),
        ({"extra": 1}, 422),
    ],
)
async def test_a_wrong_order_is_refused_and_nothing_goes_out(service: Any, changes: Any, status: int) -> None:
    rank = FakeRank()
    await start(service, rank)
    assert (await order(service, **changes)).status_code == status
    assert (await service.store(rank, rank.sample(1))).commands == ()


async def test_an_order_for_an_unknown_run_is_refused(service: Any) -> None:
    answer = await order(service)
    assert answer.status_code == 404
    assert "no run" in answer.json()["detail"]


@pytest.mark.parametrize("approved", [True, False])
async def test_what_the_agents_propose_waits_for_one_decision(service: Any, approved: bool) -> None:
    first, second = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, first, second, policy="approve")
    await service.store(first, local("proposed"))
    await service.store(second, local("proposed"))
    [proposal] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert (proposal["state"], proposal["source"]) == ("proposed", "agent")
    assert (await service.store(first, first.sample(21))).commands == ()
    word = "approve" if approved else "reject"
    decision = {"who": "ann", "reason": "agreed"}
    decided = await service.client.post(f"/v1/commands/{proposal['id']}/{word}", json=decision)
    assert decided.json()["state"] == ("pending" if approved else "rejected")
    sent = (await service.store(first, first.sample(22))).commands
    assert [type(command) for command in sent] == ([Command] if approved else [])
    again = await service.client.post(f"/v1/commands/{proposal['id']}/{word}", json=decision)
    assert again.status_code == 409
