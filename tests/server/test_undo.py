"""A switch is undone on request, head by head, and is then no longer judged or counted."""

from typing import Any

import pytest
from tests.server.orders import local
from tests.server.switched_runs import ORDER, commands_of, grown, judge, switched

from foreshock.contract.wire import Command, Switched
from foreshock.server.testing import FakeRank

WHO = {"who": "bob", "reason": "it cost too much"}


def answer(rank: FakeRank, command: Command, before: list[str]) -> Switched:
    """The answer of a rank whose heads had different modes."""
    said = rank.answer(command, 30)
    return said.model_copy(update={"before": tuple(before)})


async def test_an_applied_switch_is_undone_on_request_head_by_head_to_the_modes_there_were(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started())
    heads = [[0, 0], [0, 1], [0, 2]]
    command = (await service.client.post("/v1/runs/run-1/commands", json={**ORDER, "heads": heads})).json()["id"]
    early = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
    assert (early.status_code, early.json()["detail"]) == (
        409,
        f"Command {command} is pending, so you cannot undo it; you can cancel it.",
    )
    [sent] = (await service.store(rank, rank.sample(10))).commands
    await service.store(rank, answer(rank, sent, ["plain", "paper_softmax", "exact_delta"]))

    undone = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
    assert undone.status_code == 201
    orders = (await service.store(rank, rank.sample(40))).commands
    assert {(o.mode, o.heads, o.expect) for o in orders} == {
        ("plain", ((0, 0),), "exact_delta"),
        ("paper_softmax", ((0, 1),), "exact_delta"),
    }  # head 2 had the mode before
    for one in orders:
        await service.store(rank, rank.answer(one, 41))
    shown = await service.get(f"/v1/commands/{command}")
    assert shown["undone_by"] in {one.id for one in orders}
    taken_back = [c for c in await commands_of(service) if c["undoes"] == command]
    assert {(c["state"], c["reason"]) for c in taken_back} == {("applied", "undo: it cost too much")}
    again = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
    assert again.status_code == 409
    assert "undone by" in again.json()["detail"]
    actors = {row["actor"] for row in (await service.get("/v1/audit"))["rows"]}
    assert "bob (local)" in actors


async def test_a_dry_run_of_an_undo_leaves_the_undo_open_and_an_undone_switch_is_not_verified(service: Any) -> None:
    command = await switched(service)
    tried = await service.client.post(f"/v1/commands/{command}/undo", json={**WHO, "dry_run": True})
    [order] = tried.json()["commands"]
    assert (order["dry_run"], order["mode"], order["undoes"]) == (True, "plain", command)
    assert (await service.get(f"/v1/commands/{command}"))["undone_by"] is None
    await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
    rank = FakeRank(boot="b2")
    await service.store(rank, rank.started(step=3000))
    for sent in (await service.store(rank, rank.sample(3010))).commands:
        await service.store(rank, rank.answer(sent, 3011, "dry_run" if sent.dry_run else "applied"))
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] is None


async def test_what_an_agent_switched_by_itself_can_be_undone_as_well(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started())
    await service.store(rank, local("applied"))
    [shown] = await commands_of(service)
    assert (shown["state"], shown["source"]) == ("applied", "rank")
    assert (await service.store(rank, rank.sample(21))).commands == (), "nobody else holds the head"
    told = [(row["actor"], row["action"]) for row in (await service.get("/v1/audit"))["rows"]]
    assert ("rank 0", "local switch") in told
    assert (await service.client.post(f"/v1/commands/{shown['id']}/undo", json=WHO)).status_code == 201
    [sent] = (await service.store(rank, rank.sample(21))).commands
    assert (sent.mode, sent.expect, sent.heads) == ("plain", "exact_delta", ((0, 2),))


async def test_an_undo_leaves_out_heads_that_did_not_get_the_mode_of_the_order(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1))
    order = {**ORDER, "heads": [[0, 1], [0, 2]]}
    command = (await service.client.post("/v1/runs/run-1/commands", json=order)).json()["id"]
    [sent] = (await service.store(rank, rank.sample(2))).commands
    answer = rank.answer(sent, 3).model_copy(update={"after": ("exact_delta", "row_corrected")})
    await service.store(rank, answer)
    assert (await service.client.post(f"/v1/commands/{command}/undo", json=WHO)).status_code == 201
    [back] = (await service.store(rank, rank.sample(4))).commands
    assert (back.mode, back.heads) == ("plain", ((0, 1),))


def not_arrested(text: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith('foreshock_switch_not_arrested{run="run-1"}')]
    return float(line.split()[-1])


@pytest.mark.parametrize("what_then", ["undone", "replaced"])
async def test_a_switch_that_did_not_arrest_its_heads_is_a_metric_until_it_is_undone_or_replaced(
    service: Any, what_then: str
) -> None:
    command = await switched(service, after=1.0)

    async def shown() -> float:
        return not_arrested((await service.client.get("/metrics")).text)

    assert await shown() == 0
    await judge(service)
    assert await shown() == 1
    rank = FakeRank()
    rank.sequence = 1000
    path = f"/v1/commands/{command}/undo" if what_then == "undone" else "/v1/runs/run-1/commands"
    order = WHO if what_then == "undone" else {**ORDER, "mode": "row_corrected"}
    assert (await service.client.post(path, json=order)).status_code < 300
    assert await shown() == 1, "ordered is not done"
    for sent in (await service.store(rank, grown(rank, 3100, 1.0))).commands:
        await service.store(rank, rank.answer(sent, 3100))
    assert await shown() == 0
