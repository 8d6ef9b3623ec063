"""Every order ends in a clear state: cancelled, answered by who lives, or expired with the names of the silent."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.orders import order, start, state_of

from foreshock.contract.wire import Command
from foreshock.server import commands
from foreshock.server.testing import FakeRank
from foreshock.server.verification import verify

pytestmark = pytest.mark.promise("S11")
WHY = {"who": "bob", "reason": "the wrong run"}


async def cancel(service: Any, command: str, **headers: str) -> Any:
    return await service.client.post(f"/v1/commands/{command}/cancel", json=WHY, headers=headers)


async def deeds(service: Any, command: str) -> list[tuple[str, str]]:
    """(actor, state or outcome) of every row of the audit trail about the command, oldest first."""
    page = await service.get("/v1/audit", limit=500)
    own = [row for row in reversed(page["rows"]) if row["command"] == command]
    return [(row["actor"], row["details"].get("state") or row["details"]["outcome"]) for row in own]


async def test_a_cancelled_order_goes_to_nobody_and_the_audit_trail_says_who_stopped_it(service: Any) -> None:
    rank = FakeRank()
    await start(service, rank)
    command = (await order(service)).json()["id"]
    answer = await cancel(service, command)
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert (await service.store(rank, rank.sample(1))).commands == ()
    assert (await deeds(service, command))[-1] == ("bob (local)", "cancelled")
    [event, *_] = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    assert "is cancelled (bob (local))" in event["sentence"]
    again = await cancel(service, command)
    assert (
        again.status_code,
        "is cancelled, so you cannot cancel it; you can undo it." in again.json()["detail"],
    ) == (409, True)


async def test_what_ranks_did_before_the_cancel_stays_visible_and_can_be_undone(service: Any) -> None:
    quick, slow, late = FakeRank(rank=0), FakeRank(rank=1), FakeRank(rank=2)
    await start(service, quick, slow, late)
    command = (await order(service)).json()["id"]
    [sent] = (await service.store(quick, quick.sample(1))).commands
    await service.store(slow, slow.sample(1))
    await service.store(quick, quick.answer(sent, 2))
    assert (await cancel(service, command)).status_code == 200
    assert (await service.store(late, late.sample(1))).commands == ()
    await service.store(slow, slow.answer(sent, 3))  # it was under way
    shown = await service.get(f"/v1/commands/{command}")
    assert shown["state"] == "cancelled"
    assert [(a["rank"], a["outcome"]) for a in shown["ranks"]] == [(0, "applied"), (1, "applied")]
    undone = await service.client.post(f"/v1/commands/{command}/undo", json=WHY)
    assert undone.status_code == 201, undone.text
    [back] = undone.json()["commands"]
    assert (back["mode"], back["heads"], back["undoes"]) == ("plain", [[0, 2]], command)


@pytest.mark.parametrize("state", ["proposed", "applied"])
async def test_only_what_is_under_way_can_be_cancelled(service: Any, state: str) -> None:
    rank = FakeRank()
    await start(service, rank, policy="approve")
    if state == "applied":
        command = (await order(service)).json()["id"]
        [sent] = (await service.store(rank, rank.sample(1))).commands
        await service.store(rank, rank.answer(sent, 2))
    else:
        asked = Command(id="c", mode="exact_delta", heads=((0, 1),), reason="it drifts", issued_by="rank 0")
        await service.store(rank, rank.answer(asked, 2, "proposed").model_copy(update={"command": None}))
        command = (await service.get("/v1/runs/run-1/commands"))["commands"][0]["id"]
    assert await state_of(service, command) == state
    answer = await cancel(service, command)
    assert (answer.status_code, answer.json()["title"]) == (409, "Conflict")
    assert await state_of(service, command) == state
    assert (await cancel(service, "cmd-nope")).status_code == 404


async def test_the_answer_of_a_process_that_is_gone_does_not_close_the_order_of_its_successor(service: Any) -> None:
    """It applied the order and was killed, its answer in its spool; the successor resumed from before the switch."""
    dead, living = FakeRank(boot="b2"), FakeRank(boot="b1")
    await service.store(dead, dead.started(), dead.sample(1), age=100)
    command = (await order(service)).json()["id"]
    [sent] = (await service.store(dead, dead.sample(2), age=101)).commands
    await service.store(living, living.started(), age=1)
    await service.store(dead, dead.answer(sent, 3), age=102, replayed=True)
    assert await state_of(service, command) == "delivered"
    assert ("rank 0, a former process", "applied") in await deeds(service, command)
    [again] = (await service.store(living, living.sample(1), age=2)).commands
    assert again == sent
    await service.store(living, living.answer(again, 2), age=3)
    shown = await service.get(f"/v1/commands/{command}")
    assert (shown["state"], [a["step"] for a in shown["ranks"]]) == ("applied", [2])


@pytest.mark.promise("S27")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.settings(verify_steps=100)
async def test_a_switch_after_the_step_from_which_a_run_resumes_is_neither_shown_nor_judged(
    service: Any, ranks: int
) -> None:
    async def plan() -> Any:
        found = await service.get("/v1/runs/run-1/switches", mode="paper_softmax")  # adds that to what heads have
        return [change["mode"] for change in found["changes"]]

    former = [FakeRank(rank=rank, boot="b1") for rank in range(2)]
    for rank in former:
        await service.store(rank, rank.started(world_size=2), rank.sample(899, since=0), age=100)
    command = (await order(service, heads=None)).json()["id"]
    for rank in former:
        [sent] = (await service.store(rank, rank.verdict(899), rank.sample(900), age=101)).commands
        await service.store(rank, rank.answer(sent, 901), age=102)
    assert (await state_of(service, command), await plan()) == ("applied", ["exact_delta+paper_softmax"])
    for rank in (FakeRank(rank=rank, boot="b2") for rank in range(ranks)):
        steps = range(510, 1101, 10)
        await service.store(rank, rank.started(step=500, world_size=ranks), rank.verdict(900, name="again"), age=2)
        await service.store(rank, rank.sample(510, since=500), age=2)
        assert await plan() == ["paper_softmax"] or rank.rank < ranks - 1
        await service.store(rank, *(rank.sample(step, since=step - 10) for step in steps[1:]), age=3)
    state = service.app.state
    await verify(state.store, state.settings)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] is None


async def test_an_order_that_nobody_answers_any_more_expires_and_says_who_was_silent(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [FakeRank(rank=number) for number in range(3)]
    await start(service, *ranks)
    command = (await order(service, expires_in_seconds=5.0)).json()["id"]
    for rank in ranks[:2]:
        [sent] = (await service.store(rank, rank.sample(1))).commands
    await service.store(ranks[0], ranks[0].answer(sent, 2))
    now = time.time()
    monkeypatch.setattr(commands, "time", SimpleNamespace(time=lambda: now + 5 + 61))
    with service.app.state.store.writer.engine.begin() as connection:
        commands.expire(connection)
    assert await state_of(service, command) == "expired"
    [event, *_] = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    assert "is expired; no answer from ranks 1, 2" in event["sentence"]
