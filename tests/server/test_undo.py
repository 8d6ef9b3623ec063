"""A switch is undone on request, head by head, and is then no longer judged or counted."""

from typing import Any

import pytest
from tests.server.orders import commands_of, local, order, start
from tests.server.switched_runs import grown, judge, switched

from foreshock.server.testing import FakeRank

WHO = {"who": "bob", "reason": "it cost too much"}


async def test_an_applied_switch_is_undone_once_head_by_head_to_the_modes_that_it_changed(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1))
    command = (await order(service, heads=[[0, 0], [0, 1], [0, 2], [1, 0]])).json()["id"]
    path = f"/v1/commands/{command}/undo"
    early = await service.client.post(path, json=WHO)
    pending = f"Command {command} is pending, so you cannot undo it; you can cancel it."
    assert (early.status_code, early.json()["detail"]) == (409, pending)
    [sent] = (await service.store(rank, rank.sample(10))).commands
    modes = {"before": ("plain", "paper_softmax", "exact_delta", "plain")}
    modes |= {"after": ("exact_delta",) * 3 + ("row_corrected",)}  # the last head did not get the order's mode
    await service.store(rank, rank.answer(sent, 30).model_copy(update=modes))
    assert (await service.client.post(path, json=WHO)).status_code == 201
    orders = (await service.store(rank, rank.sample(40))).commands
    assert {(o.mode, o.heads, o.expect) for o in orders} == {
        ("plain", ((0, 0),), "exact_delta"),
        ("paper_softmax", ((0, 1),), "exact_delta"),
    }  # head 2 had the mode before
    for one in orders:
        await service.store(rank, rank.answer(one, 41))
    assert (await service.get(f"/v1/commands/{command}"))["undone_by"] in {one.id for one in orders}
    taken_back = [c for c in await commands_of(service) if c["undoes"] == command]
    assert {(c["state"], c["reason"]) for c in taken_back} == {("applied", "undo: it cost too much")}
    again = await service.client.post(path, json=WHO)
    assert (again.status_code, "undone by" in again.json()["detail"]) == (409, True)
    assert "bob (local)" in {row["actor"] for row in (await service.get("/v1/audit"))["rows"]}


async def test_a_dry_run_of_an_undo_leaves_the_undo_open_and_an_undone_switch_is_not_verified(service: Any) -> None:
    command = await switched(service)
    tried = await service.client.post(f"/v1/commands/{command}/undo", json={**WHO, "dry_run": True})
    [undone] = tried.json()["commands"]
    assert (undone["dry_run"], undone["mode"], undone["undoes"]) == (True, "plain", command)
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


@pytest.mark.parametrize("what_then", ["undone", "replaced"])
async def test_a_switch_that_did_not_arrest_its_heads_is_a_metric_until_it_is_undone_or_replaced(
    service: Any, what_then: str
) -> None:
    command = await switched(service, after=1.0)

    async def shown() -> float:
        lines = (await service.client.get("/metrics")).text.splitlines()
        [line] = [line for line in lines if line.startswith('foreshock_switch_not_arrested{run="run-1"}')]
        return float(line.split()[-1])

    assert await shown() == 0
    await judge(service)
    assert await shown() == 1
    rank = FakeRank()
    rank.sequence = 1000
    if what_then == "undone":
        await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
    else:
        await order(service, mode="row_corrected")
    assert await shown() == 1, "ordered is not done"
    for sent in (await service.store(rank, grown(rank, 3100, 1.0))).commands:
        await service.store(rank, rank.answer(sent, 3100))
    assert await shown() == 0


async def test_an_order_for_every_head_adds_to_modes_that_were_set_by_hand_and_says_so_before(service: Any) -> None:
    async def planned(mode: str) -> list[list[Any]]:
        answer = await service.get("/v1/runs/run-1/switches", mode=mode)
        return [*([change["mode"], change["heads"]] for change in answer["changes"]), answer["unchanged"]]

    rank = FakeRank()
    await start(service, rank)
    assert await planned("row_corrected") == [["row_corrected", None], []]
    own = {(0, 2): "paper_softmax", (1, 0): "paper_softmax+row_corrected"}
    for ref, mode in own.items():
        await order(service, heads=[list(ref)], mode=mode)
    for command in (await service.store(rank, rank.sample(10))).commands:
        await service.store(rank, rank.answer(command, 10))
    others = [[0, 0], [0, 1], [1, 1], [1, 2]]
    expected = [["row_corrected", others], ["paper_softmax+row_corrected", [[0, 2]]], [[1, 0]]]
    assert await planned("row_corrected") == expected
    assert await planned("plain") == [["plain", None], []]
    answer = await service.client.get("/v1/runs/run-1/switches?mode=nothing")
    assert answer.status_code == 422
    assert (await service.client.get("/v1/runs/run-9/switches?mode=plain")).status_code == 404
