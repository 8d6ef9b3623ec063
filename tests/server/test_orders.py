"""Orders of people: created once, delivered to each affected rank, answered, and closed in a definite state."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update
from tests.server.orders import commands_of, local, order, start, state_of
from tests.server.switched_runs import grown, judge, switched

from foreshock.contract.orders import KINDS
from foreshock.contract.wire import MAX_ACK_BYTES, Ack, Command, Finished, Switched
from foreshock.server import commands
from foreshock.server.commands import expire
from foreshock.server.store import schema
from foreshock.server.testing import FakeRank
from foreshock.server.verification import verify

pytestmark = pytest.mark.promise("S11")
BY_BOB = {"who": "bob", "reason": "the wrong run"}
RUN = "/v1/runs/run-1"


async def act(service: Any, command: str, word: str) -> Any:
    return await service.client.post(f"/v1/commands/{command}/{word}", json=BY_BOB)


async def audit_of(service: Any, command: str) -> list[tuple[str, str]]:
    """(actor, state or outcome) of every row of the audit trail about the command, oldest first."""
    rows = (await service.get("/v1/audit", limit=500))["rows"]
    own = [row for row in reversed(rows) if row["command"] == command]
    return [(row["actor"], row["details"].get("state") or row["details"]["outcome"]) for row in own]


async def newest_sentence(service: Any) -> str:
    event: str = (await service.get(f"{RUN}/events", kind="command"))["events"][0]["sentence"]
    return event


async def end(service: Any, *ranks: FakeRank, status: Any = "completed") -> None:
    for rank in ranks:
        await service.store(rank, Finished(step=30, unix_seconds=30.0, status=status))


# ---- created --------------------------------------------------------------------------------------------------------


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
async def test_invalid_order_is_refused_and_not_delivered(
    service: Any, rank: FakeRank, changes: Any, status: int
) -> None:
    unknown = await order(service)
    assert (unknown.status_code, "no run" in unknown.json()["detail"]) == (404, True)
    await start(service, rank)
    assert (await order(service, **changes)).status_code == status
    assert (await service.store(rank, rank.sample(1))).commands == ()


async def test_idempotency_key_orders_once_even_after_run_end_and_rejects_other_order(service: Any) -> None:
    rank = FakeRank(boot="b1")
    await start(service, rank)
    first, second = await order(service, "k1"), await order(service, "k1")
    assert (first.status_code, second.status_code) == (201, 200)
    assert (await order(service, "k1", mode="paper_softmax")).status_code == 409
    await end(service, rank)
    again = await order(service, "k1")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert [one["id"] for one in await commands_of(service)] == [first.json()["id"]]


@pytest.mark.parametrize("approved", [True, False])
async def test_agent_proposal_waits_for_one_decision(service: Any, approved: bool) -> None:
    first, second = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, first, second, policy="approve")
    await service.store(first, local("proposed"))
    await service.store(second, local("proposed"))
    [proposal] = await commands_of(service)
    assert (proposal["state"], proposal["source"]) == ("proposed", "agent")
    assert (await act(service, proposal["id"], "cancel")).status_code == 409
    assert (await service.store(first, first.sample(21))).commands == ()
    word = "approve" if approved else "reject"
    assert (await act(service, proposal["id"], word)).json()["state"] == ("pending" if approved else "rejected")
    sent = (await service.store(first, first.sample(22))).commands
    assert [type(command) for command in sent] == ([Command] if approved else [])
    assert (await act(service, proposal["id"], word)).status_code == 409


# ---- delivered ------------------------------------------------------------------------------------------------------


async def test_order_is_delivered_until_every_affected_rank_answers_and_is_audited(
    service: Any,
) -> None:
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
    known = await service.get(f"/v1/commands/{sent.id}")
    assert known["state"] == "applied"
    assert [(a["rank"], a["outcome"], a["step"], a["deliveries"]) for a in known["ranks"]] == [
        (0, "applied", 12, 2),
        (1, "applied", 14, 1),
    ]
    assert await audit_of(service, sent.id) == [
        ("ann (local)", "pending"),
        ("service", "delivered"),
        ("rank 0", "applied"),
        ("service", "delivered"),
        ("rank 1", "applied"),
        ("service", "applied"),
    ]
    details = next(row for row in (await service.get("/v1/audit"))["rows"] if row["action"] == "answer")["details"]
    assert (details["before"], details["after"]) == (["plain"], ["exact_delta"])


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (("applied", "refused"), "refused"),
        (("expired", "applied"), "expired"),
        (("dry_run", "dry_run"), "dry_run"),
    ],
)
async def test_order_state_follows_outcomes_of_ranks(service: Any, outcomes: Any, state: str) -> None:
    ranks = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, *ranks)
    await order(service)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        [command] = (await service.store(rank, rank.sample(10))).commands
        await service.store(rank, rank.answer(command, 11, outcome))
    assert [one["state"] for one in await commands_of(service)] == [state]


async def test_orders_larger_than_one_acknowledgement_are_sent_in_sequence(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, limit = 2, 8000
    monkeypatch.setattr(commands, "_ACK_BYTES", commands._ACK_BYTES - MAX_ACK_BYTES + limit)
    rank = FakeRank(layers=layers, heads=range(100))
    await start(service, rank)
    heads = [[layer, head] for layer in range(layers) for head in range(100)]
    ordered = [(await order(service, heads=heads, reason="é" * 400)).json()["id"] for _ in range(10)]
    delivered: list[str] = []
    for step in range(20):
        response = await service.post(rank.batch(rank.sample(step + 10)))
        assert len(response.content) <= limit
        orders = Ack.model_validate_json(response.content).commands
        for sent in orders:
            await service.store(rank, rank.answer(sent, step + 10))
        delivered += [sent.id for sent in orders]
        if not orders:
            break
    assert delivered == ordered


async def test_order_reaches_undescribed_rank_but_not_ended_or_replaced_process(
    service: Any,
) -> None:
    replaced, successor, ended, undescribed = (
        FakeRank(boot="b1"),
        FakeRank(boot="b2"),
        FakeRank(rank=1),
        FakeRank(rank=2),
    )
    await start(service, replaced, successor, ended)
    await service.store(undescribed, undescribed.sample(1))
    await end(service, ended)
    await order(service)
    assert (await service.store(replaced, replaced.sample(3))).commands == ()
    assert (await service.store(ended, ended.sample(3))).commands == ()
    for rank in (successor, undescribed):
        [command] = (await service.store(rank, rank.sample(3))).commands
        await service.store(rank, rank.answer(command, 4))
    assert await state_of(service, command.id) == "applied"


async def test_late_answer_of_dead_process_does_not_close_order_of_successor(service: Any) -> None:
    """The process was killed with its answer in the spool; its successor resumed from before the switch."""
    dead, living = FakeRank(boot="b2"), FakeRank(boot="b1")
    await service.store(dead, dead.started(), dead.sample(1), age=100)
    command = (await order(service)).json()["id"]
    [sent] = (await service.store(dead, dead.sample(2), age=101)).commands
    await service.store(living, living.started(), age=1)
    await service.store(dead, dead.answer(sent, 3), age=102, replayed=True)
    assert await state_of(service, command) == "delivered"
    assert ("rank 0, a former process", "applied") in await audit_of(service, command)
    [again] = (await service.store(living, living.sample(1), age=2)).commands
    assert again == sent
    await service.store(living, living.answer(again, 2), age=3)
    known = await service.get(f"/v1/commands/{command}")
    assert (known["state"], [a["step"] for a in known["ranks"]]) == ("applied", [2])


async def test_order_of_other_kind_is_delivered_answered_shown_and_cancelled(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = FakeRank(), FakeRank(rank=1)
    await start(service, *ranks)
    save = {"heads": None, "mode": None, "action": "save"}
    assert (await order(service, **save)).status_code == 422, "unknown kind of order"
    monkeypatch.setitem(KINDS, "save", "save a checkpoint")
    assert (await order(service, **{**save, "mode": "plain"})).status_code == 422, "only a switch has a mode"
    made = (await order(service, "k1", **save)).json()
    assert (made["action"], made["what"], made["state"]) == ("save", "save a checkpoint", "pending")
    for rank in ranks:
        [sent] = (await service.store(rank, rank.sample(1))).commands
        assert (sent.id, sent.action, sent.heads, sent.mode) == (made["id"], "save", None, "save")
        done = Switched(
            id="s", step=2, command=sent.id, outcome="applied", heads=(), before=(), after=(), reason="saved"
        )
        await service.store(rank, done, rank.verdict(3))
    known = await service.get(f"/v1/commands/{made['id']}")
    assert (known["state"], [answer["reason"] for answer in known["ranks"]]) == ("applied", ["saved", "saved"])
    assert await newest_sentence(service) == "Command to save a checkpoint is applied at step 2."
    assert (await act(service, made["id"], "undo")).status_code == 409
    [incident] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (incident["order"], incident["switched"]) == (None, 0)
    stopped = (await order(service, **save)).json()["id"]
    await service.store(ranks[0], local("proposed"))
    assert [one["state"] for one in await commands_of(service)] == ["proposed", "delivered", "applied"], (
        "an order of another kind must not block a proposal"
    )
    assert (await act(service, stopped, "cancel")).json()["state"] == "cancelled"
    await verify(service.app.state.store, service.app.state.settings)
    assert {one["verification"] for one in await commands_of(service)} == {None}


async def test_answer_from_rank_of_other_run_is_ignored(service: Any) -> None:
    rank, other = FakeRank(), FakeRank(run="run-2")
    await start(service, rank, other)
    command = (await order(service)).json()["id"]
    [sent] = (await service.store(rank, rank.sample(10))).commands
    await service.store(other, other.answer(sent, 11))
    known = await service.get(f"/v1/commands/{command}")
    assert (known["state"], [answer["outcome"] for answer in known["ranks"]]) == ("delivered", [None])


# ---- cancelled and expired ------------------------------------------------------------------------------------------


async def test_cancelled_order_is_not_delivered_further_and_can_be_undone(service: Any) -> None:
    quick, slow, late = FakeRank(rank=0), FakeRank(rank=1), FakeRank(rank=2)
    await start(service, quick, slow, late)
    command = (await order(service)).json()["id"]
    [sent] = (await service.store(quick, quick.sample(1))).commands
    await service.store(slow, slow.sample(1))
    await service.store(quick, quick.answer(sent, 2))
    response = await act(service, command, "cancel")
    assert (response.status_code, response.json()["state"]) == (200, "cancelled")
    assert (await audit_of(service, command))[-1] == ("bob (local)", "cancelled")
    assert "is cancelled (bob (local))" in await newest_sentence(service)
    again = await act(service, command, "cancel")
    assert (again.status_code, again.json()["title"]) == (409, "Conflict")
    assert "is cancelled, so you cannot cancel it; you can undo it." in again.json()["detail"]
    assert (await service.store(late, late.sample(1))).commands == ()
    await service.store(slow, slow.answer(sent, 3))  # delivered before the cancellation
    known = await service.get(f"/v1/commands/{command}")
    assert known["state"] == "cancelled"
    assert [(a["rank"], a["outcome"]) for a in known["ranks"]] == [(0, "applied"), (1, "applied")]
    [back] = (await act(service, command, "undo")).json()["commands"]
    assert (back["mode"], back["heads"], back["undoes"]) == ("plain", [[0, 2]], command)
    assert (await act(service, "cmd-nope", "cancel")).status_code == 404


async def test_expired_order_is_not_delivered_further_and_waits_for_pending_answer(
    service: Any,
) -> None:
    rank, late = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, rank, late)
    await order(service)
    [command] = (await service.store(rank, rank.sample(10))).commands
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(update(schema.commands).values(expires=time.time() - 1))
    assert (await service.store(late, late.sample(10))).commands == ()
    assert await state_of(service, command.id) == "delivered"
    for _ in range(2):  # a repeated answer changes nothing
        await service.store(rank, rank.answer(command, 12))
    assert await state_of(service, command.id) == "expired"
    assert [actor for actor, outcome in await audit_of(service, command.id) if outcome == "applied"] == ["rank 0"]


async def test_expired_order_names_silent_ranks_and_accepts_late_answers(
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
        expire(connection)
    assert await state_of(service, command) == "expired"
    assert "is expired; no answer from ranks 1, 2" in await newest_sentence(service)
    await service.store(ranks[1], ranks[1].answer(sent, 12))
    known = await service.get(f"/v1/commands/{command}")
    assert [(a["rank"], a["outcome"]) for a in known["ranks"]] == [(0, "applied"), (1, "applied")]


async def test_rank_switch_is_applied_at_expiry_after_other_ranks_end(service: Any) -> None:
    """Expiry handles all runs at once, so one order that cannot be closed would block every run."""
    first, second = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, first, second)
    await service.store(first, local("applied"))
    [switch] = await commands_of(service)
    assert (switch["state"], switch["source"]) == ("proposed", "rank")
    await end(service, second)
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(update(schema.commands).values(expires=time.time() - 1))
        expire(connection)
    assert await state_of(service, switch["id"]) == "applied"


@pytest.mark.parametrize("rejected", [False, True])
async def test_answer_to_undelivered_order_is_stored(service: Any, rank: FakeRank, rejected: bool) -> None:
    await start(service, rank, policy="approve")
    await service.store(rank, local("proposed"))
    [proposal] = await commands_of(service)
    if rejected:
        await act(service, proposal["id"], "reject")
    own = {"id": "s", "step": 3, "command": proposal["id"], "outcome": "applied", "reason": "made up"}
    await service.store(rank, Switched(heads=(), before=(), after=(), **own))
    assert await state_of(service, proposal["id"]) == "applied"


# ---- at the end of a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "heads", "named"), [("completed", [[0, 2]], "layer 0 head 2"), ("failed", None, "every head")]
)
async def test_ended_run_refuses_orders_approval_and_undo_until_resumed(
    service: Any, status: Any, heads: Any, named: str
) -> None:
    ranks, resumed = [FakeRank(), FakeRank(rank=1)], FakeRank(boot="b2")
    await start(service, *ranks, policy="approve")
    applied = (await order(service, heads=heads)).json()["id"]
    for rank in ranks:
        [sent] = (await service.store(rank, rank.sample(1))).commands
        await service.store(rank, rank.answer(sent, 2))
    await service.store(ranks[0], ranks[0].verdict(10), local("proposed"))
    proposed = (await commands_of(service))[0]["id"]
    await end(service, ranks[0], status=status)
    assert (await order(service, heads=heads)).status_code == 201, "rank 1 may still be running"
    await end(service, ranks[1], status=status)
    refused = await order(service, heads=heads)
    reason = f"Could not switch {named} to exact_delta: every rank that could do it has ended."
    assert (refused.status_code, refused.json()["detail"]) == (409, f"{reason} Order it again when the run is resumed.")
    for command, word in ((proposed, "approve"), (applied, "undo")):
        response = await act(service, command, word)
        assert (response.status_code, response.json()["detail"].startswith("Could not switch ")) == (409, True)
    assert (await act(service, proposed, "reject")).json()["state"] == "rejected"
    await start(service, resumed)
    assert (await order(service, heads=heads)).status_code == 201


async def test_order_only_to_ended_ranks_is_refused_while_others_train(service: Any) -> None:
    ended, running = FakeRank(layers=1), FakeRank(rank=1, layers=2)
    running.layers = running.layers[1:]
    await start(service, ended, running)
    await end(service, ended)
    assert (await order(service, heads=[[0, 2]])).status_code == 409
    assert (await order(service, heads=[[0, 2], [1, 0]])).status_code == 201, "a running rank has one of the heads"


@pytest.mark.parametrize(
    ("status", "delivered", "heads", "named"),
    [("completed", False, [[0, 2]], "layer 0 head 2"), ("stopped", True, None, "every head")],
)
async def test_open_order_is_refused_with_reason_when_last_rank_ends(
    service: Any, status: Any, delivered: bool, heads: Any, named: str
) -> None:
    ranks = FakeRank(), FakeRank(rank=1)
    await start(service, *ranks)
    command = (await order(service, heads=heads)).json()["id"]
    sent = (await service.store(ranks[0], ranks[0].sample(1))).commands if delivered else ()
    await end(service, ranks[0], status=status)
    assert await state_of(service, command) == ("delivered" if delivered else "pending"), "rank 1 may answer"
    await end(service, ranks[1], status=status)
    known = await service.get(f"/v1/commands/{command}")
    why = f"Could not switch {named} to exact_delta: every rank that could do it has ended."
    assert known["state"] == "refused"
    assert known["closed_because"] == f"{why} Order it again when the run is resumed."
    assert (
        await newest_sentence(service)
        == f"Command to switch {named} to exact_delta is refused: {known['closed_because']}"
    )
    assert (await audit_of(service, command))[-1] == ("service", "refused")
    for late in sent:  # a late answer corrects the state
        await service.store(ranks[0], ranks[0].answer(late, 2))
        known = await service.get(f"/v1/commands/{command}")
        assert (known["state"], known["closed_because"]) == ("applied", None)


async def test_late_end_of_former_process_does_not_close_order_of_successor(service: Any) -> None:
    ended, resumed = FakeRank(boot="b1"), FakeRank(boot="b2")
    await service.store(ended, ended.started(), age=100)
    command = (await order(service)).json()["id"]
    await service.store(resumed, resumed.started(), age=1)
    await service.store(ended, Finished(step=9, unix_seconds=9.0, status="stopped"), age=102, replayed=True)
    assert await state_of(service, command) == "delivered"
    await service.store(resumed, Finished(step=9, unix_seconds=9.0, status="completed"), age=100, replayed=True)
    assert await state_of(service, command) == "refused", (
        "the end of the successor itself closes the order, even from a spool"
    )


async def test_order_waits_for_heads_that_no_rank_currently_has(service: Any) -> None:
    """The run resumes with other ranks, and the process that takes over the head has not started yet."""
    killed, first, second = FakeRank(boot="b1"), FakeRank(boot="b2"), FakeRank(boot="b2", rank=1)
    first.layers = first.layers[1:]
    await start(service, killed)
    command = (await order(service)).json()["id"]
    await start(service, first)
    assert await state_of(service, command) == "pending"
    await start(service, second)
    assert [sent.id for sent in (await service.store(second, second.sample(1))).commands] == [command]


@pytest.mark.promise("S27")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.settings(verify_steps=100)
async def test_switch_after_resume_step_is_neither_planned_nor_verified(service: Any, ranks: int) -> None:
    async def plan() -> Any:
        found = await service.get(f"{RUN}/switches", mode="paper_softmax")  # adds this mode to the modes of the heads
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


async def test_undo_restores_previous_mode_of_each_switched_head_once(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(), rank.sample(1))
    command = (await order(service, heads=[[0, 0], [0, 1], [0, 2], [1, 0]])).json()["id"]
    path = f"/v1/commands/{command}/undo"
    early = await service.client.post(path, json=BY_BOB)
    pending = f"Command {command} is pending, so you cannot undo it; you can cancel it."
    assert (early.status_code, early.json()["detail"]) == (409, pending)
    [sent] = (await service.store(rank, rank.sample(10))).commands
    modes = {"before": ("plain", "paper_softmax", "exact_delta", "plain")}
    modes |= {"after": ("exact_delta",) * 3 + ("row_corrected",)}  # the last head got another mode than ordered
    await service.store(rank, rank.answer(sent, 30).model_copy(update=modes))
    assert (await service.client.post(path, json=BY_BOB)).status_code == 201
    orders = (await service.store(rank, rank.sample(40))).commands
    assert {(o.mode, o.heads, o.expect) for o in orders} == {
        ("plain", ((0, 0),), "exact_delta"),
        ("paper_softmax", ((0, 1),), "exact_delta"),
    }  # head 2 already had the mode
    for one in orders:
        await service.store(rank, rank.answer(one, 41))
    assert (await service.get(f"/v1/commands/{command}"))["undone_by"] in {one.id for one in orders}
    taken_back = [c for c in await commands_of(service) if c["undoes"] == command]
    assert {(c["state"], c["reason"]) for c in taken_back} == {("applied", "undo: the wrong run")}
    again = await service.client.post(path, json=BY_BOB)
    assert (again.status_code, "undone by" in again.json()["detail"]) == (409, True)
    assert "bob (local)" in {row["actor"] for row in (await service.get("/v1/audit"))["rows"]}


async def test_dry_run_undo_changes_nothing_and_undone_switch_is_not_verified(service: Any) -> None:
    command = await switched(service)
    tried = await service.client.post(f"/v1/commands/{command}/undo", json={**BY_BOB, "dry_run": True})
    [undone] = tried.json()["commands"]
    assert (undone["dry_run"], undone["mode"], undone["undoes"]) == (True, "plain", command)
    assert (await service.get(f"/v1/commands/{command}"))["undone_by"] is None
    await service.client.post(f"/v1/commands/{command}/undo", json=BY_BOB)
    rank = FakeRank(boot="b2")
    await service.store(rank, rank.started(step=3000))
    for sent in (await service.store(rank, rank.sample(3010))).commands:
        await service.store(rank, rank.answer(sent, 3011, "dry_run" if sent.dry_run else "applied"))
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] is None


async def test_switch_by_agent_can_be_undone(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started())
    await service.store(rank, local("applied"))
    [shown] = await commands_of(service)
    assert (shown["state"], shown["source"]) == ("applied", "rank")
    assert (await service.store(rank, rank.sample(21))).commands == (), "no other rank has the head"
    rows = [(row["actor"], row["action"]) for row in (await service.get("/v1/audit"))["rows"]]
    assert ("rank 0", "local switch") in rows
    assert (await service.client.post(f"/v1/commands/{shown['id']}/undo", json=BY_BOB)).status_code == 201
    [sent] = (await service.store(rank, rank.sample(21))).commands
    assert (sent.mode, sent.expect, sent.heads) == ("plain", "exact_delta", ((0, 2),))


@pytest.mark.parametrize("resolution", ["undone", "replaced"])
async def test_not_arrested_metric_is_set_until_switch_is_undone_or_replaced(
    service: Any, rank: FakeRank, resolution: str
) -> None:
    command = await switched(service, after=1.0)

    async def shown() -> float:
        lines = (await service.client.get("/metrics")).text.splitlines()
        [line] = [line for line in lines if line.startswith('foreshock_switch_not_arrested{run="run-1"}')]
        return float(line.split()[-1])

    assert await shown() == 0
    await judge(service)
    assert await shown() == 1
    rank.sequence = 1000
    if resolution == "undone":
        await service.client.post(f"/v1/commands/{command}/undo", json=BY_BOB)
    else:
        await order(service, mode="row_corrected")
    assert await shown() == 1, "the order is not applied yet"
    for sent in (await service.store(rank, grown(rank, 3100, 1.0))).commands:
        await service.store(rank, rank.answer(sent, 3100))
    assert await shown() == 0


async def test_switch_plan_for_every_head_adds_to_modes_set_by_hand(service: Any, rank: FakeRank) -> None:
    async def planned(mode: str) -> list[list[Any]]:
        plan = await service.get("/v1/runs/run-1/switches", mode=mode)
        return [*([change["mode"], change["heads"]] for change in plan["changes"]), plan["unchanged"]]

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
    unknown = await service.client.get("/v1/runs/run-1/switches?mode=nothing")
    assert unknown.status_code == 422
    assert (await service.client.get("/v1/runs/run-9/switches?mode=plain")).status_code == 404
