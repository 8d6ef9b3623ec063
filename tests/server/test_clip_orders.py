"""QK-Clip by order: asked for, approved, delivered, answered, and never undone in silence."""

from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.server.orders import order, start, state_of
from tests.server.switched_runs import judge

from foreshock.contract.orders import ORDERS, OrderInfo
from foreshock.contract.wire import Array, Clipped, Command, Policy, Switched, Verdict
from foreshock.server.testing import FakeRank

WHO = {"who": "bob", "reason": "the scores grow"}


def answered(command: Command, outcome: str = "applied", reason: str = "QK-Clip is on") -> Switched:
    """As an agent answers an order that changes no head's mode."""
    return Switched.model_validate(
        {"id": "a-1", "step": 30, "command": command.id, "outcome": outcome, "heads": [], "before": [], "after": [],
         "reason": reason}
    )  # fmt: skip


def growing(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "id": "w-1", "step": 20, "state": "raised", "severity": "critical", "layer": 0, "head": 2,
        "cause": "score growth", "signal": "score", "sentence": "Layer 0 head 2 grows.",
    }  # fmt: skip
    return Verdict(**fields | changes)


def proposed() -> Switched:
    return Switched.model_validate(
        {"id": "local-1", "step": 20, "outcome": "proposed", "heads": [[0, 2]], "before": ["qk_clip_never"],
         "after": ["qk_clip_always"], "reason": "scores grow", "verdict": "w-1"}
    )  # fmt: skip


async def incident(service: Any) -> dict[str, Any]:
    [found] = [i for i in (await service.get("/v1/runs/run-1/incidents"))["incidents"] if i["cause"] == "score growth"]
    return dict(found)


@pytest.mark.promise("A26")
def test_an_order_for_qk_clip_goes_the_way_of_every_order_and_its_undo_is_refused_with_the_reason(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(qk_clip="never"))
        reply = await order(service, mode="qk_clip_always", heads=None)
        assert reply.status_code == 201
        command = reply.json()["id"]
        [sent] = (await service.store(rank, rank.sample(10))).commands
        assert (sent.action, sent.mode, sent.heads) == ("qk_clip", "qk_clip_always", None)
        assert await state_of(service, command) == "delivered"
        await service.store(rank, answered(sent))
        assert await state_of(service, command) == "applied"
        undo = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
        assert undo.status_code == 409
        assert "cannot be undone: weights that it scaled stay so" in undo.json()["detail"]
        log = [event["sentence"] for event in (await service.get("/v1/runs/run-1/events"))["events"]]
        assert "Order applied. QK-Clip is on" in log
        assert any(line.startswith("Command to set QK-Clip to always is applied") for line in log)

    play(story)


def test_an_order_needs_an_entry_and_no_more_to_go_its_way(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of the service keeps a list of its own."""
    name, title, words = "save_now", "Checkpoint", "save a checkpoint"
    stays = "saved a checkpoint, which stays."
    entry = OrderInfo(action="save", title=title, words=words, does="It saves.", stays=stays)
    monkeypatch.setitem(ORDERS, name, entry)

    async def story(service: Any) -> None:
        rank = FakeRank()
        offered = proposed().model_copy(update={"before": (name,), "after": (name,)})
        await service.store(rank, rank.started(policy="auto"), growing(), offered)
        assert not (await service.get("/v1/runs/run-1/commands"))["commands"], "it is no remedy of an incident"
        assert (await order(service, mode=name, heads=[[0, 2]])).status_code == 422
        command = (await order(service, mode=name, heads=None)).json()["id"]
        [sent] = (await service.store(rank, rank.sample(30))).commands
        assert (sent.action, sent.mode, sent.heads) == ("save", name, None)
        await service.store(rank, answered(sent, reason="It is saved."), rank.sample(2000))
        assert await state_of(service, command) == "applied"
        await judge(service)
        [shown] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert shown["verification"] is None
        undo = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
        assert undo.json()["detail"] == f"Command {command} saved a checkpoint, which stays."
        log = [event["sentence"] for event in (await service.get("/v1/runs/run-1/events"))["events"]]
        assert {"Checkpoint: proposed. scores grow", "Order applied. It is saved."} <= set(log)
        assert any(line.startswith("Command to save a checkpoint is applied") for line in log)
        text = (await service.client.get("/metrics")).text
        assert 'mode="save_now"' in text
        assert (await incident(service))["ask"] == "none"

    play(story)


@pytest.mark.parametrize("changes", [{"heads": [[0, 2]]}, {"heads": None, "expect": "plain"}])
def test_an_order_for_qk_clip_of_some_heads_or_against_a_mode_is_refused(play: Any, changes: dict[str, Any]) -> None:
    async def story(service: Any) -> None:
        await start(service, FakeRank())
        reply = await order(service, mode="qk_clip_warned", **changes)
        assert reply.status_code == 422
        assert "is for every head and expects no mode" in reply.text

    play(story)


@pytest.mark.promise("A26")
@pytest.mark.parametrize(("policy", "proposes"), [("observe", False), ("approve", True), ("auto", True)])
def test_an_alert_of_scores_that_grow_proposes_qk_clip_and_no_policy_lets_it_order_it(
    play: Any, policy: Policy, proposes: bool
) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(policy=policy, qk_clip="never"), growing())
        alert = {
            "status": "firing", "fingerprint": "f", "startsAt": "t",
            "labels": {"alertname": "ForeshockHeadFailing", "run": "run-1", "cause": "score growth"},
        }  # fmt: skip
        reply = await service.client.post("/v1/webhooks/alertmanager", json={"alerts": [alert]})
        [result] = reply.json()["results"]
        orders = (await service.get("/v1/runs/run-1/commands"))["commands"]
        if not proposes:
            assert (result, orders) == ("observed: no switch helps against score growth", [])
            assert (await incident(service))["ask"] == "qk_clip"
            return
        assert result == "proposed"
        [waiting] = orders
        assert (waiting["mode"], waiting["heads"], waiting["state"]) == ("qk_clip_always", None, "proposed")
        assert not (await service.store(rank, rank.sample(30))).commands
        shown = await incident(service)
        assert (shown["ask"], shown["order"]["id"]) == ("approve", waiting["id"])
        await service.client.post(f"/v1/commands/{waiting['id']}/approve", json=WHO)
        [sent] = (await service.store(rank, rank.sample(40))).commands
        assert sent.action == "qk_clip"

    play(story)


def test_what_an_agent_proposes_waits_for_a_person_whose_no_holds_until_a_warning_is_raised_anew(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(policy="auto", qk_clip="never"), growing(), proposed())
        [waiting] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert (waiting["mode"], waiting["heads"], waiting["state"]) == ("qk_clip_always", None, "proposed")
        await service.client.post(f"/v1/commands/{waiting['id']}/reject", json=WHO)
        shown = await incident(service)
        assert (shown["ask"], shown["order"]["state"]) == ("none", "rejected")
        await service.store(rank, growing(state="updated", step=40), proposed().model_copy(update={"id": "local-2"}))
        assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1
        again = growing(step=60), proposed().model_copy(update={"id": "local-3"})
        await service.store(rank, *again)
        orders = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert [one["state"] for one in orders] == ["proposed", "rejected"]

    play(story)


def test_what_a_rank_says_it_did_by_itself_orders_qk_clip_of_nobody(play: Any) -> None:
    async def story(service: Any) -> None:
        ranks = FakeRank(), FakeRank(rank=1)
        for rank in ranks:
            await service.store(rank, rank.started(policy="auto", qk_clip="never"), growing())
        await service.store(ranks[0], proposed().model_copy(update={"outcome": "applied"}))
        assert not (await service.store(ranks[1], ranks[1].sample(30))).commands
        assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []

    play(story)


def test_what_qk_clip_did_stands_in_the_log_and_in_the_audit_trail(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        did = Clipped(
            id="c-1", step=40, on=True, heads=((0, 1), (0, 2)), factors=(0.9, 0.34), times=(2, 7), reason="two passed"
        )
        await service.store(rank, rank.started(qk_clip="on"), did)
        [event] = (await service.get("/v1/runs/run-1/events", kind="clipped"))["events"]
        assert event["clipped"]["factors"] == [0.9, 0.34]
        assert event["sentence"] == (
            "Rank 0: QK-Clip scaled layer 0 head 1, layer 0 head 2, smallest factor 0.34, at most 7 times each. "
            "two passed"
        )
        [row] = [row for row in (await service.get("/v1/audit"))["rows"] if row["action"] == "qk_clip"]
        assert (row["actor"], row["details"]["heads"]) == ("rank 0", [[0, 1], [0, 2]])
        assert (row["details"]["smallest_factor"], row["details"]["times"]) == (0.34, 9)
        assert (await service.get("/v1/runs/run-1"))["qk_clip"] == "on"

    play(story)


def test_a_scrape_tells_which_heads_were_scaled_how_strongly_and_how_often_in_all(play: Any) -> None:
    async def story(service: Any) -> None:
        for number in range(2):
            rank = FakeRank(rank=number)
            clip = {"clip_factor": np.array([1, 1, 0.25, 0.5, 1, 1]), "clipped_steps": np.array([0, 0, 4, 1, 0, 0])}
            arrays = {name: Array.of(values.astype(np.float32)) for name, values in clip.items()}
            sample = rank.sample(10).model_copy(update=arrays)
            # of ranks that scale alike the first tells; an older word of its own counts no more
            words = [
                Clipped(id=f"c-{step}", step=step, on=True, total=0 if number else step, reason="x") for step in (5, 9)
            ]
            await service.store(rank, rank.started(qk_clip="on"), sample, *words)
        text = (await service.client.get("/metrics")).text
        samples = [each for family in parse_text(text) for each in family.samples]
        shown = {(each.name, *(f"{k}={v}" for k, v in sorted(each.labels.items()))): each.value for each in samples}
        assert shown["foreshock_run_clips_total", "run=run-1"] == 9.0
        assert shown["foreshock_run_clipped_heads", "run=run-1"] == 2.0
        assert shown["foreshock_layer_clip_factor_ratio", "layer=0", "run=run-1"] == 0.25
        assert shown["foreshock_head_clipped_steps", "head=2", "layer=0", "run=run-1"] == 4.0

    play(story)


def test_a_note_stands_in_the_log_and_is_no_warning(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        note = growing(id="note-20", severity="info", state="cleared", layer=None, head=None, sentence="Note: 143.")
        await service.store(rank, rank.started(), rank.sample(20), note)
        log = (await service.get("/v1/runs/run-1/events", kind="verdict"))["events"]
        assert [event["sentence"] for event in log] == ["Note: 143."]
        detail = await service.get("/v1/runs/run-1")
        assert (detail["warnings"], detail["active_warnings"], detail["severity"]) == ([], 0, None)
        assert "foreshock_warning_raised_total{" not in (await service.client.get("/metrics")).text

    play(story)
