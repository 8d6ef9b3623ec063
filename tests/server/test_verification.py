"""Verification of a switch after some steps, and escalation if the growth continues."""

import asyncio
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select
from tests.server.orders import ORDER, commands_of, local
from tests.server.switched_runs import grown, judge, switched
from tests.server.test_notifier import FakeOutgoing, notifier_of

from foreshock.contract.modes import Mode, parse_mode
from foreshock.contract.orders import Order
from foreshock.contract.slots import Slot
from foreshock.contract.wire import Array, Policy, Sample, head_refs
from foreshock.server.commands import create
from foreshock.server.store.schema import runs
from foreshock.server.testing import FakeRank


@pytest.mark.parametrize(
    ("before", "after", "size", "verdict"),
    [
        (1.0, -0.2, 4.0, "verified"),
        (1.0, 0.3, 4.0, "verified"),
        (1.0, 0.5, 4.0, "not arrested"),
        (1.0, 1.0, 4.0, "not arrested"),
        (0.0, 0.0, 4.0, "verified"),
        (0.0, 0.5, 4.0, "not arrested"),
        # an offset of a few tenths of a nat is below the level of the detectors, even if it grows fivefold
        (0.1, 1.6, 0.3, "verified"),
        (0.1, 1.6, 4.0, "not arrested"),
    ],
)
async def test_switch_verdict_compares_growth_before_and_after_the_switch(
    service: Any, before: float, after: float, size: float, verdict: str
) -> None:
    command = await switched(service, before=before, after=after, size=size)
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] == verdict
    events = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    [event] = [event for event in events if event["command"]["verification"]]
    assert event["command"]["verification"] == verdict
    assert event["sentence"].startswith("Layer 0 head 2 after the switch to exact_delta at step 2,000: ")
    rows = (await service.get("/v1/audit"))["rows"]
    [row] = [row for row in rows if row["details"].get("verification")]
    signals = {signal: growths for signal, *growths in row["details"]["growth"]["0.2"]}
    # The middles of the first and the last third of a window are two thirds of the window apart.
    assert signals["largest score"] == pytest.approx([before * 2 / 3, after * 2 / 3], abs=0.05)
    await judge(service)  # a second verification adds nothing
    assert len((await service.get("/v1/audit"))["rows"]) == len(rows)


def of_heads(rank: FakeRank, step: int, sizes: dict[int, float], mode: Mode = Mode.PLAIN) -> Sample:
    """A sample in which these heads of layer 0 have these offsets and all others 1 nat."""
    words = rank.words(step)
    floats = words.view(np.float64)
    size = np.array([sizes.get(head, 1.0) if layer == 0 else 1.0 for layer, head in head_refs(rank.layers)])
    floats[:, Slot.SCORE_MAX] = floats[:, Slot.ROW_MAX_ABS] = 20.0
    floats[:, Slot.SCORE_OFFSET_SUM] = -size * words[:, Slot.ROWS]
    floats[:, Slot.SCORE_OFFSET_SUMSQ] = size**2 * words[:, Slot.ROWS]
    return rank.sample(step, since=step - 20, mode=int(mode)).model_copy(update={"states": Array.of(words)})


async def two_heads(service: Any, *later: Any, warned: tuple[int, ...] = (2,), cleared: bool = False) -> dict[str, Any]:
    """Switch every head at step 2000: head 2, which drifted, stops; head 1 then grows from 3.5 to 7 nats."""
    rank = FakeRank()
    await service.store(rank, rank.started(policy="approve"))
    before = (of_heads(rank, at, {2: 2 + at / 400, 1: 3.5}) for at in range(20, 2000, 20))
    await service.store(rank, *before, *(rank.verdict(1990, head=head, name=f"w-{head}") for head in warned))
    order = {**ORDER, "heads": None, "mode": "row_corrected"}
    command = (await service.client.post("/v1/runs/run-1/commands", json=order)).json()["id"]
    [sent] = (await service.store(rank, of_heads(rank, 2000, {2: 7.0, 1: 3.5}))).commands
    await service.store(rank, rank.answer(sent, 2000), *later)
    sizes = ({2: 7.0, 1: 3.5 if at < 2500 else 7.0} for at in range(2020, 3020, 20))
    after = (of_heads(rank, 2020 + 20 * n, size, Mode.ROW_CORRECTED) for n, size in enumerate(sizes))
    await service.store(rank, *after)
    if cleared:
        verdicts = (rank.verdict(2990, head=head, name=f"w-{head}", state="cleared") for head in warned)
        await service.store(rank, *verdicts)
    await judge(service)
    events = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    shown = await service.get(f"/v1/commands/{command}")
    return {"verification": shown["verification"], "sentence": events[0]["sentence"], "events": events}


async def test_growth_of_head_without_warning_does_not_affect_verification(service: Any) -> None:
    """The switch stopped the warned head; growth of a healthy head must not make it a failure."""
    result = await two_heads(service)
    assert result["verification"] == "verified"
    assert result["sentence"].startswith("Layer 0 head 2 after the switch to row_corrected at step 2,000: verified")


async def test_head_warned_after_the_switch_affects_verification(service: Any) -> None:
    result = await two_heads(service, FakeRank().verdict(2500, head=1, name="later", cause="score growth"))
    assert result["verification"] == "not arrested"
    assert result["sentence"].startswith("Layer 0 head 1 after the switch")


@pytest.mark.parametrize(
    ("cleared", "advice"),
    [
        (False, "There is no stronger mode: resume from a checkpoint."),
        (True, "These heads have no active warning: watch the growth."),
    ],
)
async def test_verification_event_gives_growth_of_named_head_and_advice(
    service: Any, cleared: bool, advice: str
) -> None:
    result = await two_heads(service, warned=(1, 2), cleared=cleared)
    offset = "score offset +0 % in the 1,000 steps before, +100 % in those after"
    assert result["sentence"] == (
        "Layer 0 head 1 after the switch to row_corrected at step 2,000: not arrested, the growth continues "
        f"({offset}). {advice}"
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"warnings": ()}, id="no warning"),
        pytest.param({"warnings": [{"severity": "info"}]}, id="a note"),
        pytest.param({"warnings": [{"state": "cleared"}]}, id="a warning that was cleared before"),
        pytest.param({"warnings": [{"step": 3001}]}, id="a warning after the verification steps"),
        pytest.param({"had": "exact_delta"}, id="the head had the mode before"),
        pytest.param({"plain_from": 2500}, id="another order or a resume made it plain"),
    ],
)
async def test_switch_without_warned_head_in_new_mode_is_not_judged(service: Any, changes: dict[str, Any]) -> None:
    command = await switched(service, **changes)
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] == "unknown"
    event = (await service.get("/v1/runs/run-1/events", kind="command"))["events"][0]
    assert event["sentence"] == (
        "The switch to exact_delta at step 2,000 is not judged: no head with a warning had it for 1,000 steps."
    )
    assert event["command"]["verification"] is None
    assert [one["source"] for one in await commands_of(service)] == ["api"]


@pytest.mark.parametrize("undone", [False, True])
async def test_switch_to_plain_and_undone_switch_are_not_verified(service: Any, undone: bool) -> None:
    """An undo may restore a mitigation that the head had before; nobody ordered it as a cure."""
    changes: dict[str, Any] = {"had": "paper_softmax"} if undone else {"mode": "plain", "had": "exact_delta"}
    command = await switched(service, **changes)
    if undone:
        await service.client.post(f"/v1/commands/{command}/undo", json={"who": "ann", "reason": "too dear"})
        rank = FakeRank()
        rank.sequence = 1000
        [sent] = (await service.store(rank, grown(rank, 3020, 1.0))).commands
        mode = int(parse_mode(sent.mode))
        assert mode
        await service.store(rank, rank.answer(sent, 3020))
        await service.store(rank, *(grown(rank, step, 1.0, mode=mode) for step in range(3040, 4060, 20)))
    await judge(service)
    assert {one["verification"] for one in await commands_of(service)} == {None}


async def test_only_growing_head_with_active_warning_is_escalated(
    service: Any,
) -> None:
    other = {"head": 1, "name": "w-1"}
    warnings: list[dict[str, Any]] = [{}, other, {**other, "state": "cleared", "step": 2990}]
    await switched(service, warnings=warnings, mode="paper_softmax", heads=[[0, 1], [0, 2]])
    await judge(service)
    [proposed, _] = await commands_of(service)
    assert (proposed["source"], proposed["heads"]) == ("service", [[0, 2]])


@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
async def test_switch_that_arrests_nothing_is_escalated_as_proposal_except_under_observe(
    service: Any, policy: Policy
) -> None:
    await switched(service, policy=policy, mode="paper_softmax")
    await judge(service)
    proposed = [c for c in await commands_of(service) if c["source"] == "service"]
    if policy == "observe":
        assert proposed == []
        return
    [stronger] = proposed
    assert (stronger["state"], stronger["mode"]) == ("proposed", "exact_delta+paper_softmax")
    assert stronger["heads"] == [[0, 2]]
    assert "not arrested, the growth continues" in stronger["reason"]
    await judge(service)
    assert len(await commands_of(service)) == 2


@pytest.mark.promise("S22")
@pytest.mark.parametrize("rejected", [False, True])
def test_escalation_respects_cooldown_and_rejection(run_scenario: Any, rejected: bool) -> None:
    async def scenario(service: Any) -> None:
        await switched(service, mode="paper_softmax")
        with service.app.state.store.writer.engine.begin() as connection:
            run_id = connection.execute(select(runs.c.id)).scalar_one()
            source: Any
            source, heads = ("agent", [(0, 2)]) if rejected else ("alertmanager", [(1, 0)])
            state: Any = "proposed" if rejected else "pending"
            proposal = create(
                connection,
                run_id,
                Order(source=source, issued_by="x", reason="it drifts", heads=heads, mode="exact_delta", state=state),
            )
        if rejected:
            no = {"who": "ann", "reason": "bad data"}
            await service.client.post(f"/v1/commands/{proposal}/reject", json=no)
        await judge(service)
        assert sorted(c["source"] for c in await commands_of(service)) == sorted([source, "api"])

    run_scenario(scenario, webhook_cooldown_seconds=0 if rejected else 300)


async def test_verification_waits_for_steps_then_is_unknown_with_too_few_samples(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(), rank.sample(10))
    await service.store(rank, rank.verdict(10))
    command = (await service.client.post("/v1/runs/run-1/commands", json=ORDER)).json()["id"]
    [sent] = (await service.store(rank, rank.sample(20))).commands
    await service.store(rank, rank.answer(sent, 20), rank.sample(1000))
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] is None
    await service.store(rank, rank.sample(1020))
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] == "unknown"


@pytest.mark.settings(webhook_cooldown_seconds=0)
async def test_concurrent_verifications_write_one_verdict_and_one_proposal(service: Any) -> None:
    await switched(service, mode="paper_softmax")
    await asyncio.gather(judge(service), judge(service))
    events = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    assert [bool(event["command"]["verification"]) for event in events].count(True) == 1
    assert [one["source"] for one in await commands_of(service)].count("service") == 1


async def test_verification_starts_at_step_of_last_rank_to_switch(service: Any) -> None:
    ranks = [FakeRank(), FakeRank(rank=1)]
    for rank in ranks:
        await service.store(rank, rank.started(), *(grown(rank, step, 1.0, 4.0) for step in range(20, 2000, 20)))
    await service.store(ranks[0], ranks[0].verdict(1990))
    command = (await service.client.post("/v1/runs/run-1/commands", json=ORDER)).json()["id"]
    mode = int(Mode.EXACT_DELTA)
    for rank, at in zip(ranks, (2000, 2600), strict=True):
        [sent] = (await service.store(rank, grown(rank, at, 1.0, 4.0))).commands
        await service.store(rank, rank.answer(sent, at))
    for until, verdict in ((3100, None), (3640, "not arrested")):
        for rank in ranks:
            steps = range(until - 480, until + 1, 20)
            await service.store(rank, *(grown(rank, step, 1.0, 4.0, mode) for step in steps))
        await judge(service)
        assert (await service.get(f"/v1/commands/{command}"))["verification"] == verdict
    events = (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
    assert any("at step 2,600: not arrested" in event["sentence"] for event in events)


async def test_due_switch_is_verified_despite_many_that_never_become_due(service: Any) -> None:
    command = await switched(service, after=-0.2)
    ended = FakeRank(run="run-2")
    own = [local("applied", f"own-{n}") for n in range(20)]
    await service.store(ended, ended.started(), ended.sample(20), *own)
    await judge(service)
    assert (await service.get(f"/v1/commands/{command}"))["verification"] == "verified"


async def test_notification_reports_failed_switch_and_its_escalation(service: Any) -> None:
    out = FakeOutgoing()
    notifier = await notifier_of(service, out)
    await switched(service, mode="paper_softmax")
    await judge(service)
    await notifier.turn()
    await notifier.turn()
    [result] = [message for message in out.sent if "not arrested" in message]
    became, proposed = result.splitlines()[-3:-1]  # the verification and the proposal that follows
    assert became.startswith("Run run-1: Layer 0 head 2 after the switch to paper_softmax at step 2,000: not arrested")
    assert "Escalate: exact_delta+paper_softmax" in became
    assert "is proposed (service)" in proposed
