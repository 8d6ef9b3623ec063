"""Where rounding and score growth are one incident, QK-Clip is proposed once its switch is judged, and never before."""

from typing import Any

import numpy as np
import pytest
from tests.server.switched_runs import WINDOW, commands_of, grown, judge
from tests.server.test_clip_orders import growing, proposed
from tests.server.test_notifier import Out, notifier_of
from tests.server.test_webhooks import alert, delivery

from foreshock.contract.modes import Mode
from foreshock.contract.wire import Policy, Verdict
from foreshock.server.testing import FakeRank

RUN = "/v1/runs/run-1"
WHO = {"who": "ada", "reason": "seen"}
CLIP = "qk_clip_always"
SIZE = 4.0
"""Nats that the offset begins at."""


def drifting(rank: FakeRank, step: int, **changes: Any) -> Verdict:
    return rank.verdict(step, head=1, name="drift", **changes)


async def one_of_both(service: Any) -> dict[str, Any]:
    [found] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert found["causes"] == ["rounding", "score growth"]
    return dict(found)


def turns(incident: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in incident["remedies"]}


async def both(service: Any, policy: Policy = "approve") -> FakeRank:
    """A run in which head 1 drifts and head 2 grows, and whose agent proposes QK-Clip at once."""
    rank = FakeRank()
    await service.store(rank, rank.started(policy=policy, mitigation="row_corrected", qk_clip="never"))
    await service.store(rank, *(grown(rank, step, 1.0, SIZE) for step in range(20, 2000, 20)))
    await service.store(rank, growing(step=1960), drifting(rank, 1980), proposed())
    return rank


async def switch(service: Any, rank: FakeRank, rate: float) -> None:
    """Let the proposal of the switch out at step 2000; the run grows at this rate for 1000 steps more."""
    [waits] = [one for one in await commands_of(service) if one["state"] == "proposed" and one["mode"] != CLIP]
    await service.client.post(f"/v1/commands/{waits['id']}/approve", json=WHO)
    [sent] = (await service.store(rank, grown(rank, 2000, 1.0, SIZE))).commands
    await service.store(rank, rank.answer(sent, 2000))
    base, mode = SIZE * np.exp((1.0 - rate) * 2000 / WINDOW), int(Mode.ROW_CORRECTED)
    await service.store(rank, *(grown(rank, step, rate, base, mode) for step in range(2020, 3020, 20)))


async def modes_of(service: Any) -> list[str]:
    return [one["mode"] for one in await commands_of(service)]


@pytest.mark.parametrize("rate", [-0.2, 1.0])
def test_first_the_switch_then_whatever_came_of_it_qk_clip_as_a_proposal_of_its_own(play: Any, rate: float) -> None:
    async def story(service: Any) -> None:
        rank = await both(service)
        found = await one_of_both(service)
        assert await modes_of(service) == [], "the agent's proposal of QK-Clip came too early"
        assert (found["act"], turns(found)) == ("propose", {"switch": "now", "qk_clip": "later"})
        assert await alert(service, delivery()) == "proposed"
        [proposal] = await commands_of(service)
        assert (proposal["mode"], proposal["heads"]) == ("row_corrected", [[0, 1]]), "no switch of a head that grows"
        await switch(service, rank, rate)
        found = await one_of_both(service)
        assert (found["state"], turns(found)["qk_clip"], await modes_of(service)) == (
            "switched", "later", ["row_corrected"],
        )  # fmt: skip
        await judge(service)
        found = await one_of_both(service)
        assert found["state"] == ("open" if rate < 0 else "not arrested")
        assert (turns(found), found["ask"]) == ({"switch": "done", "qk_clip": "now"}, "approve")
        clip, _ = await commands_of(service)
        assert (clip["mode"], clip["state"], clip["source"], clip["heads"]) == (CLIP, "proposed", "service", None)
        assert found["order"]["id"] == clip["id"]
        await judge(service)
        await service.store(rank, growing(step=3040, state="updated"))
        assert await alert(service, delivery(state=found["state"])) in ("observed", "duplicate")
        assert len(await commands_of(service)) == 2, "it is proposed once"
        await service.client.post(f"/v1/commands/{clip['id']}/reject", json=WHO)
        await service.store(rank, growing(step=3060, state="updated"))
        assert ((await one_of_both(service))["ask"], len(await commands_of(service))) == ("none", 2)

    play(story, webhook_cooldown_seconds=0)


@pytest.mark.parametrize("cooldown", [0, 300])
def test_a_verdict_that_leads_to_a_stronger_mode_proposes_that_alone(play: Any, cooldown: int) -> None:
    async def story(service: Any) -> None:
        rank = await both(service)
        order = {"mode": "exact_delta", "heads": [[0, 1]]} | WHO
        await service.client.post(f"{RUN}/commands", json=order)
        [sent] = (await service.store(rank, grown(rank, 2000, 1.0, SIZE))).commands
        await service.store(rank, rank.answer(sent, 2000))
        mode = int(Mode.EXACT_DELTA)
        await service.store(rank, *(grown(rank, step, 1.0, SIZE, mode) for step in range(2020, 3020, 20)))
        await judge(service)
        assert await modes_of(service) == ["exact_delta+row_corrected", "exact_delta"]
        found = await one_of_both(service)
        assert turns(found) == {"switch": "now", "qk_clip": "later"}
        await judge(service)
        await service.store(rank, growing(step=3040, state="updated"))
        assert len(await commands_of(service)) == 2

    play(story, webhook_cooldown_seconds=cooldown)


@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
@pytest.mark.parametrize("cause", ["rounding", "score growth"])
def test_of_one_cause_alone_no_machine_proposes_the_remedy_of_the_other(play: Any, policy: Any, cause: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(policy=policy, qk_clip="never"), growing(cause=cause), proposed())
        for told in ("rounding", "score growth"):
            await alert(service, delivery(cause=told))
        clips = {mode == CLIP for mode in await modes_of(service)}
        assert clips <= {cause == "score growth"}
        assert bool(clips) == (policy != "observe" or cause == "score growth"), "what the cause calls for is proposed"

    play(story)


def test_where_the_drift_has_ended_by_itself_qk_clip_is_proposed_for_the_growth_that_is_left(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = await both(service)
        await service.store(rank, drifting(rank, 2500, state="cleared"))
        [clip] = await commands_of(service)
        assert (clip["mode"], clip["source"]) == (CLIP, "service")
        found = await one_of_both(service)
        assert (found["standing"], found["ask"], turns(found)) == (1, "approve", {"qk_clip": "now"})

    play(story)


def test_people_hear_once_that_both_stand_and_the_log_closes_what_was_told_apart(play: Any) -> None:
    async def story(service: Any) -> None:
        out, rank = Out(), FakeRank()
        notifier = await notifier_of(service, out)
        await service.store(rank, rank.started(policy="observe", qk_clip="never"), growing())
        await notifier.turn()
        await service.client.post(f"{RUN}/acknowledge", json=WHO | {"incident": "score-growth"})
        await service.store(rank, drifting(rank, 30))
        for _ in range(2):
            await notifier.turn()
        found = await one_of_both(service)
        assert (found["state"], found["acknowledged"]["who"]) == ("acknowledged", "ada (local)")
        events = (await service.get(f"{RUN}/events", kind="incident"))["events"]
        assert [(one["incident"]["id"], one["incident"]["state"]) for one in events[:2]] == [
            ("score-growth", "closed"),
            ("rounding", "acknowledged"),
        ]
        assert "joins rounding: both stand in this run." in events[0]["sentence"]
        told = out.said[-1]
        assert "Scores drift as rounding drives them in layer 0 head 1, and scores grow" in told
        assert "Type: foreshock switch run-1 --mode" in told
        assert "qk-clip" not in told

    play(story)
