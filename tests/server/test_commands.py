from typing import Any

import pytest

from foreshock.contract.wire import MAX_ACK_BYTES, Ack, Command, Finished, Policy, Switched
from foreshock.server.testing import FakeRank

ORDER = {"who": "ann", "reason": "it drifts", "heads": [[0, 2]], "mode": "exact_delta"}


async def order(service: Any, key: str | None = None, **changes: Any) -> Any:
    headers = {"idempotency-key": key} if key else {}
    return await service.client.post("/v1/runs/run-1/commands", json={**ORDER, **changes}, headers=headers)


async def start(service: Any, *ranks: FakeRank, policy: Policy = "auto") -> None:
    for rank in ranks:
        await service.store(rank, rank.started(policy=policy))


async def state_of(service: Any, command: str) -> str:
    state: str = (await service.get(f"/v1/commands/{command}"))["state"]
    return state


def local(outcome: str, name: str = "local-1", step: int = 20) -> Switched:
    return Switched.model_validate(
        {
            "id": name,
            "step": step,
            "outcome": outcome,
            "heads": [[0, 2]],
            "before": ["plain"],
            "after": ["exact_delta"],
            "reason": "offset grows",
            "verdict": "warn-1",
        }
    )


@pytest.mark.promise("S11")
def test_a_command_goes_to_every_rank_with_the_head_until_each_has_answered(play: Any) -> None:
    async def story(service: Any) -> None:
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

    play(story)


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
def test_a_command_ends_as_its_ranks_say(play: Any, outcomes: Any, state: str) -> None:
    async def story(service: Any) -> None:
        ranks = FakeRank(rank=0), FakeRank(rank=1)
        await start(service, *ranks)
        await order(service)
        for rank, outcome in zip(ranks, outcomes, strict=True):
            [command] = (await service.store(rank, rank.sample(10))).commands
            await service.store(rank, rank.answer(command, 11, outcome))
        [shown] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert shown["state"] == state

    play(story)


@pytest.mark.full
def test_orders_that_fill_more_than_one_acknowledgement_go_out_one_after_another(play: Any) -> None:
    async def story(service: Any) -> None:
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

    play(story)


@pytest.mark.promise("S11")
def test_every_transition_stands_in_the_audit_trail_and_the_chain_shows_a_change(play: Any) -> None:
    async def story(service: Any) -> None:
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
        assert page["intact"]
        async with service.app.state.store.write() as connection:
            await connection.exec_driver_sql("UPDATE audit SET actor = 'someone else' WHERE sequence = 3")
        assert not (await service.get("/v1/audit"))["intact"]

    play(story)


def test_an_idempotency_key_orders_once_and_refuses_another_order(play: Any) -> None:
    async def story(service: Any) -> None:
        await start(service, FakeRank())
        first, second = await order(service, "k1"), await order(service, "k1")
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json()["id"] == second.json()["id"]
        assert (await order(service, "k1", mode="stable_softmax")).status_code == 409
        assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1

    play(story)


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
def test_a_wrong_order_is_refused_and_nothing_goes_out(play: Any, changes: Any, status: int) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await start(service, rank)
        assert (await order(service, **changes)).status_code == status
        assert (await service.store(rank, rank.sample(1))).commands == ()

    play(story)


def test_an_order_for_an_unknown_run_is_refused(play: Any) -> None:
    async def story(service: Any) -> None:
        answer = await order(service)
        assert answer.status_code == 404
        assert "no run" in answer.json()["detail"]

    play(story)


def test_an_order_expires_and_a_late_answer_still_tells_the_truth(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(service: Any) -> None:
        rank, silent = FakeRank(rank=0), FakeRank(rank=1)
        await start(service, rank, silent)
        await order(service, expires_in_seconds=60.0)
        [command] = (await service.store(rank, rank.sample(10))).commands
        import time

        now = time.time()
        monkeypatch.setattr("foreshock.server.commands.delivery.time.time", lambda: now + 120)
        assert (await service.store(silent, silent.sample(10))).commands == ()
        assert await state_of(service, command.id) == "expired"
        await service.store(rank, rank.answer(command, 12))
        shown = await service.get(f"/v1/commands/{command.id}")
        assert [(a["rank"], a["outcome"]) for a in shown["ranks"]] == [(0, "applied")]

    play(story)


def test_a_command_for_every_head_reaches_a_rank_that_has_not_said_what_it_holds(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.sample(1))
        assert (await order(service, heads=None)).status_code == 201
        assert len((await service.store(rank, rank.sample(2))).commands) == 1

    play(story)


def test_a_finished_rank_and_a_superseded_boot_get_no_command(play: Any) -> None:
    async def story(service: Any) -> None:
        old, new, gone = FakeRank(boot="b1"), FakeRank(boot="b2"), FakeRank(rank=1)
        await start(service, old, new, gone)
        await service.store(gone, Finished(step=5, unix_seconds=1.0, status="completed"))
        await order(service)
        assert (await service.store(old, old.sample(3))).commands == ()
        assert (await service.store(gone, gone.sample(3))).commands == ()
        [command] = (await service.store(new, new.sample(3))).commands
        await service.store(new, new.answer(command, 4))
        assert await state_of(service, command.id) == "applied"

    play(story)


@pytest.mark.promise("S11")
def test_a_local_switch_is_passed_on_to_the_other_ranks_that_hold_the_head(play: Any) -> None:
    async def story(service: Any) -> None:
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

    play(story)


def test_a_local_switch_of_a_lonely_rank_stands_among_the_commands_and_goes_nowhere(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await start(service, rank)
        await service.store(rank, local("applied"))
        [shown] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert (shown["state"], shown["source"]) == ("applied", "rank")
        assert (await service.store(rank, rank.sample(21))).commands == ()
        told = [(row["actor"], row["action"]) for row in (await service.get("/v1/audit"))["rows"]]
        assert ("rank 0", "local switch") in told

    play(story)


@pytest.mark.parametrize("approved", [True, False])
def test_what_the_agents_propose_waits_for_one_decision(play: Any, approved: bool) -> None:
    async def story(service: Any) -> None:
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

    play(story)


def test_a_mode_of_a_newer_agent_is_told_and_kept_and_no_other_rank_is_ordered_or_refused(play: Any) -> None:
    async def story(service: Any) -> None:
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

    play(story)


@pytest.mark.parametrize("name", ["no such mode", "x" * 65, "<b>", "plain\n"])
def test_a_report_of_what_cannot_be_a_mode_is_refused_with_a_sentence(play: Any, name: str) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        for event in (
            rank.started().model_copy(update={"mitigation": name}),
            local("applied").model_copy(update={"after": (name,)}),
        ):
            refused = await service.post(rank.batch(event))
            assert refused.status_code == 422
            assert "String should" in refused.json()["errors"][0]["message"]

    play(story)
