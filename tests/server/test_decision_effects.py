"""Effects of decisions on incidents and metrics, and how long a rejection blocks automatic actions."""

from typing import Any

import pytest
from tests.server.orders import local, order
from tests.server.test_webhooks import alert, delivery

from foreshock.contract.wire import Finished
from foreshock.server.testing import FakeRank

RUN = "/v1/runs/run-1"
BY_ADA = {"who": "Ada", "reason": "seen"}

pytestmark = pytest.mark.promise("S22")


async def incident(service: Any) -> Any:
    [found] = (await service.get(f"{RUN}/incidents"))["incidents"]
    return found


async def proposed(service: Any) -> tuple[FakeRank, dict[str, Any]]:
    """A run with policy approve and a proposal to switch its warned head."""
    rank = FakeRank()
    await service.store(rank, rank.started(policy="approve"), rank.sample(19), rank.verdict(20), local("proposed"))
    [proposal] = (await service.get(f"{RUN}/commands"))["commands"]
    return rank, proposal


async def decide(service: Any, command: str, word: str) -> None:
    response = await service.client.post(f"/v1/commands/{command}/{word}", json=BY_ADA)
    assert response.status_code in (200, 201), response.text


async def metric(service: Any, name: str) -> str:
    """The line of this metric of the incident."""
    lines: list[str] = (await service.client.get("/metrics")).text.splitlines()
    return next(line for line in lines if line.startswith(f"foreshock_incident_{name}{{"))


@pytest.mark.parametrize("ended", [False, True])
async def test_acknowledgement_appears_in_next_scrape_even_of_ended_run(
    service: Any, rank: FakeRank, ended: bool
) -> None:
    last = [Finished(step=1, unix_seconds=2.0, status="completed")] * ended
    await service.store(rank, rank.started(policy="approve"), rank.sample(1), rank.verdict(1), *last)
    assert (await metric(service, "acknowledged")).endswith(" 0.0")
    await service.client.post(f"{RUN}/acknowledge", json=BY_ADA | {"incident": "rounding"})
    assert (await metric(service, "acknowledged")).endswith(" 1.0")


async def test_incident_follows_approved_order_until_it_is_applied(service: Any) -> None:
    rank, proposal = await proposed(service)
    before = await incident(service)
    for text in (before["done"], await metric(service, "words")):
        assert "waits for your approval" in text
    assert (before["ask"], before["order"]["id"]) == ("approve", proposal["id"])
    await decide(service, proposal["id"], "approve")
    assert "Approved by Ada" in await metric(service, "words")
    states = [await incident(service)]
    [command] = (await service.store(rank, rank.sample(21))).commands
    states.append(await incident(service))
    await service.store(rank, rank.answer(command, 21))
    states.append(await incident(service))
    assert [one["order"]["state"] for one in states] == ["pending", "delivered", "applied"]
    assert [one["state"] for one in states] == ["open", "open", "switched"]
    for one in states:
        assert "waits for your approval" not in one["done"]
        assert "Approved by Ada" in one["done"]
        assert one["to_do"].startswith("Wait for")
        assert one["ask"] == "none"
    detail = await service.get(RUN)
    assert [one["state"] for one in detail["incidents"]] == ["switched"]
    [layer] = [one for one in detail["layers"] if one["layer"] == 0]
    assert dict(zip(layer["heads"], layer["modes"], strict=True))[2] == "exact_delta"


async def test_incident_asks_for_new_order_after_approved_one_is_cancelled(service: Any) -> None:
    _, proposal = await proposed(service)
    await decide(service, proposal["id"], "approve")
    await decide(service, proposal["id"], "cancel")
    found = await incident(service)
    assert found["done"].startswith("No head was switched. Approved by Ada")
    assert found["done"].endswith("stopped.")
    assert found["ask"] == "switch"
    assert "stopped" in await metric(service, "words")
    await order(service)
    assert "Ordered by ann" in await metric(service, "words")


async def test_rejection_blocks_agent_and_webhook_until_a_new_warning(service: Any) -> None:
    rank, proposal = await proposed(service)
    await decide(service, proposal["id"], "reject")
    found = await incident(service)
    assert found["done"].startswith("Rejected by Ada")
    assert "has a new warning" in found["done"]
    assert (found["ask"], found["order"]["state"]) == ("none", "rejected")
    response = await service.client.post("/v1/webhooks/alertmanager", json=delivery())
    [result] = response.json()["results"]
    assert result.startswith("observed: a person rejected this switch")
    worse = rank.verdict(30, state="updated", severity="critical")
    await service.store(rank, worse, local("proposed", "local-2", 30))
    second = FakeRank(rank=1)
    started = second.started(policy="approve")
    await service.store(second, started, second.sample(31), second.verdict(31), local("proposed", "local-3", 31))
    states = [c["state"] for c in (await service.get(f"{RUN}/commands"))["commands"]]
    assert states == ["rejected"]
    cleared = [one.model_copy(update={"state": "cleared"}) for one in (rank.verdict(40), second.verdict(40))]
    await service.store(rank, cleared[0])
    await service.store(second, cleared[1])
    new_proposal = local("proposed", "local-4", 50).model_copy(update={"verdict": "warn-2"})
    await service.store(rank, rank.verdict(50, name="warn-2"), new_proposal)
    states = [c["state"] for c in (await service.get(f"{RUN}/commands"))["commands"]]
    assert states == ["proposed", "rejected"]
    assert (await incident(service))["ask"] == "approve"


async def test_warning_of_resumed_process_allows_new_proposal_after_rejection(service: Any) -> None:
    _, proposal = await proposed(service)
    await decide(service, proposal["id"], "reject")
    resumed = FakeRank(boot="b2")
    await service.store(resumed, resumed.started(policy="approve", step=10), resumed.sample(11))
    await service.store(resumed, resumed.verdict(20), local("proposed", "local-2"))
    states = [c["state"] for c in (await service.get(f"{RUN}/commands"))["commands"]]
    assert states == ["proposed", "rejected"]


async def test_undone_switch_blocks_webhooks_until_a_new_warning(
    service: Any,
    rank: FakeRank,
) -> None:
    await service.store(rank, rank.started(policy="auto"), rank.sample(1), rank.verdict(1))
    await order(service)
    [command] = (await service.store(rank, rank.sample(2))).commands
    await service.store(rank, rank.answer(command, 3), rank.sample(4, mode=1))
    [switch] = (await service.get(f"{RUN}/commands"))["commands"]
    await decide(service, switch["id"], "undo")
    [undo] = (await service.store(rank, rank.sample(5, mode=1))).commands
    undone = rank.answer(undo, 6).model_copy(update={"before": ("exact_delta",)})
    await service.store(rank, undone, rank.sample(7))
    found = await incident(service)
    assert "set to plain" in found["done"]
    assert found["ask"] == "none"
    assert await alert(service, delivery()) == "observed"
    await service.store(rank, rank.verdict(8, state="cleared"), rank.verdict(9, name="warn-2"))
    later_alert = delivery()
    later_alert["alerts"][0]["startsAt"] = "2026-11-21T12:00:00Z"
    assert await alert(service, later_alert) == "ordered"
