"""Orders on their way: to each rank that holds a head, until it has answered, or until they expire."""

import time
from typing import Any

import pytest
from sqlalchemy import update
from tests.server.orders import order, start, state_of

from foreshock.contract.wire import MAX_ACK_BYTES, Ack, Finished
from foreshock.server.store.schema import commands
from foreshock.server.testing import FakeRank


@pytest.mark.promise("S11")
async def test_a_command_goes_to_every_rank_with_the_head_until_each_has_answered(service: Any) -> None:
    first, second, other = FakeRank(rank=0), FakeRank(rank=1), FakeRank(rank=2, heads=(3, 4))
    await start(service, first, second, other)
    command = (await order(service)).json()
    assert command["state"] == "pending"
    [sent] = (await service.store(first, first.sample(10))).commands
    assert (sent.id, sent.mode, sent.heads) == (command["id"], "exact_delta", ((0, 2),))
    assert (await service.store(other, other.sample(10))).commands == ()
    assert await state_of(service, sent.id) == "delivered"
    [again] = (await service.store(first, first.sample(11))).commands
    assert again == sent
    assert (await service.store(first, first.answer(sent, 12))).commands == ()
    assert await state_of(service, sent.id) == "delivered"
    [late] = (await service.store(second, second.sample(10))).commands
    await service.store(second, second.answer(late, 14))
    shown = await service.get(f"/v1/commands/{sent.id}")
    assert shown["state"] == "applied"
    assert [(a["rank"], a["outcome"], a["step"], a["deliveries"]) for a in shown["ranks"]] == [
        (0, "applied", 12, 2),
        (1, "applied", 14, 1),
    ]


@pytest.mark.promise("S11")
@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (("applied", "applied"), "applied"),
        (("applied", "refused"), "refused"),
        (("expired", "applied"), "expired"),
        (("dry_run", "dry_run"), "dry_run"),
    ],
)
async def test_a_command_ends_as_its_ranks_say(service: Any, outcomes: Any, state: str) -> None:
    ranks = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, *ranks)
    await order(service)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        [command] = (await service.store(rank, rank.sample(10))).commands
        await service.store(rank, rank.answer(command, 11, outcome))
    [shown] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert shown["state"] == state


@pytest.mark.full
async def test_orders_that_fill_more_than_one_acknowledgement_go_out_one_after_another(service: Any) -> None:
    rank = FakeRank(layers=40, heads=range(100))
    await start(service, rank)
    heads = [[layer, head] for layer in range(40) for head in range(100)]
    wanted = [(await order(service, heads=heads, reason="é" * 400)).json()["id"] for _ in range(40)]
    obeyed: list[str] = []
    for step in range(20):
        answer = await service.post(rank.batch(rank.sample(step + 10)))
        assert len(answer.content) <= MAX_ACK_BYTES
        orders = Ack.model_validate_json(answer.content).commands
        for sent in orders:
            await service.store(rank, rank.answer(sent, step + 10))
        obeyed += [sent.id for sent in orders]
        if not orders:
            break
    assert obeyed == wanted


@pytest.mark.promise("S11")
async def test_an_order_past_its_expiry_goes_to_nobody_new_and_waits_for_the_answer_that_is_under_way(
    service: Any,
) -> None:
    rank, late = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, rank, late)
    await order(service)
    [command] = (await service.store(rank, rank.sample(10))).commands
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(update(commands).values(expires=time.time() - 1))
    assert (await service.store(late, late.sample(10))).commands == ()
    assert await state_of(service, command.id) == "delivered"
    for _ in range(2):  # an answer that comes again is the same one
        await service.store(rank, rank.answer(command, 12))
    assert await state_of(service, command.id) == "expired"
    deeds = (await service.get("/v1/audit"))["rows"]
    assert [deed["actor"] for deed in deeds if deed["action"] == "answer"] == ["rank 0"]


async def test_an_order_expires_and_a_late_answer_still_tells_the_truth(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, silent = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, rank, silent)
    await order(service, expires_in_seconds=60.0)
    [command] = (await service.store(rank, rank.sample(10))).commands
    now = time.time()
    monkeypatch.setattr("foreshock.server.commands.time.time", lambda: now + 120)
    assert (await service.store(silent, silent.sample(10))).commands == ()
    assert await state_of(service, command.id) == "expired"
    await service.store(rank, rank.answer(command, 12))
    shown = await service.get(f"/v1/commands/{command.id}")
    assert [(a["rank"], a["outcome"]) for a in shown["ranks"]] == [(0, "applied")]


async def test_a_command_for_every_head_reaches_a_rank_that_has_not_said_what_it_holds(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.sample(1))
    assert (await order(service, heads=None)).status_code == 201
    assert len((await service.store(rank, rank.sample(2))).commands) == 1


async def test_a_finished_rank_and_a_superseded_boot_get_no_command(service: Any) -> None:
    old, new, gone = FakeRank(boot="b1"), FakeRank(boot="b2"), FakeRank(rank=1)
    await start(service, old, new, gone)
    await service.store(gone, Finished(step=5, unix_seconds=1.0, status="completed"))
    await order(service)
    assert (await service.store(old, old.sample(3))).commands == ()
    assert (await service.store(gone, gone.sample(3))).commands == ()
    [command] = (await service.store(new, new.sample(3))).commands
    await service.store(new, new.answer(command, 4))
    assert await state_of(service, command.id) == "applied"
