"""A switch is verified some steps later, and escalated when it did not help."""

import json
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr
from sqlalchemy import select
from tests.server.switched_runs import ORDER, commands_of, judge, switched

from foreshock.contract.wire import Policy, Switched
from foreshock.server.commands.lifecycle import Order, create
from foreshock.server.notifier import Notifier
from foreshock.server.settings import Settings
from foreshock.server.store.schema import runs
from foreshock.server.testing import FakeRank
from foreshock.server.testing.fixed import settings_with


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (1.0, -0.2, "verified"),
        (1.0, 0.3, "verified"),
        (1.0, 0.5, "not arrested"),
        (1.0, 1.0, "not arrested"),
        (0.0, 0.0, "verified"),
        (0.0, 0.5, "not arrested"),
    ],
)
def test_a_switch_is_verified_by_the_growth_on_both_sides_of_it(
    play: Any, before: float, after: float, verdict: str
) -> None:
    async def story(service: Any) -> None:
        command = await switched(service, before=before, after=after)
        await judge(service)
        shown = await service.get(f"/v1/commands/{command}")
        assert shown["verification"] == verdict
        [event] = [
            e
            for e in (await service.get("/v1/runs/run-1/events", kind="command"))["events"]
            if e["command"]["verification"]
        ]
        assert event["command"]["verification"] == verdict
        assert event["sentence"].startswith("Layer 0 head 2 after the switch to exact_delta at step 2,000: ")
        rows = (await service.get("/v1/audit"))["rows"]
        [row] = [row for row in rows if row["details"].get("verification")]
        signals = {signal: growths for signal, *growths in row["details"]["growth"]["0.2"]}
        # Between the middles of the first and the last third of a window lie two thirds of it.
        assert signals["largest score"] == pytest.approx([before * 2 / 3, after * 2 / 3], abs=0.05)
        await judge(service)  # once and for all
        assert len((await service.get("/v1/audit"))["rows"]) == len(rows)

    play(story)


@pytest.mark.parametrize(("size", "verdict"), [(0.05, "verified"), (0.3, "verified"), (4.0, "not arrested")])
def test_a_healthy_head_that_was_switched_to_try_it_wandered_and_is_no_alarm(
    play: Any, size: float, verdict: str
) -> None:
    """Its offset may be five times what it was, a few hundredths of a nat; its scores grow as it learns."""

    async def story(service: Any) -> None:
        command = await switched(service, before=0.1, after=1.6, size=size)
        await judge(service)
        assert (await service.get(f"/v1/commands/{command}"))["verification"] == verdict

    play(story)


@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
def test_what_was_not_arrested_is_escalated_as_a_proposal_that_waits_for_a_person(play: Any, policy: Policy) -> None:
    async def story(service: Any) -> None:
        await switched(service, policy=policy, mode="stable_softmax")
        await judge(service)
        proposed = [c for c in await commands_of(service) if c["source"] == "service"]
        if policy == "observe":
            assert proposed == []
            return
        [stronger] = proposed
        assert (stronger["state"], stronger["mode"]) == ("proposed", "exact_delta+stable_softmax")
        assert stronger["heads"] == [[0, 2]]
        assert "not arrested, it grows on" in stronger["reason"]
        await judge(service)
        assert len(await commands_of(service)) == 2

    play(story)


def test_an_escalation_keeps_to_the_bounds_of_machines(play: Any) -> None:
    async def story(service: Any) -> None:
        await switched(service, mode="stable_softmax")
        store = service.app.state.store
        with store.writer.engine.begin() as connection:
            run_id = connection.execute(select(runs.c.id)).scalar_one()
            order = Order(run_id, "run-1", "alertmanager", "alertmanager", "it drifts", [(1, 0)], "exact_delta")
            create(connection, order)
        await judge(service)
        assert sorted(c["source"] for c in await commands_of(service)) == ["alertmanager", "api"]

    play(story)


def test_a_switch_with_too_few_samples_round_it_is_said_to_be_unknown_and_a_fresh_one_waits(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started(), rank.sample(10))
        command = (await service.client.post("/v1/runs/run-1/commands", json=ORDER)).json()["id"]
        [sent] = (await service.store(rank, rank.sample(20))).commands
        await service.store(rank, rank.answer(sent, 20), rank.sample(1000))
        await judge(service)
        assert (await service.get(f"/v1/commands/{command}"))["verification"] is None
        await service.store(rank, rank.sample(1020))
        await judge(service)
        assert (await service.get(f"/v1/commands/{command}"))["verification"] == "unknown"

    play(story)


def test_switches_whose_steps_never_pass_hide_none_that_is_due(play: Any) -> None:
    async def story(service: Any) -> None:
        command = await switched(service, after=-0.2)
        ended = FakeRank(run="run-2")
        own = [
            Switched(
                id=f"own-{n}",
                step=20,
                outcome="applied",
                heads=((0, 0),),
                before=("plain",),
                after=("exact_delta",),
                reason="policy auto",
            )
            for n in range(20)
        ]
        await service.store(ended, ended.started(), ended.sample(20), *own)
        await judge(service)
        assert (await service.get(f"/v1/commands/{command}"))["verification"] == "verified"

    play(story)


def test_people_are_told_what_became_of_a_switch(play: Any) -> None:
    class Out:
        said: ClassVar[list[str]] = []

        async def post(self, _url: str, body: bytes) -> int:
            self.said.append(json.loads(body)["message"])
            return 200

    async def story(service: Any) -> None:
        url = "https://hooks.example.org/x"
        hosts = ("hooks.example.org",)
        settings = settings_with(
            Settings, notify_webhook_url=SecretStr(url), notify_hosts=hosts, notify_gather_seconds=0.0
        )
        notifier = Notifier(service.app.state.store, settings, Out())  # type: ignore[arg-type]
        await notifier.turn()
        await switched(service, mode="stable_softmax")
        await judge(service)
        await notifier.turn()
        await notifier.turn()
        [told] = [words for words in Out.said if "not arrested" in words]
        became, proposed = told.splitlines()[-2:]  # what became of it, and the proposal that follows
        assert became.startswith(
            "Run run-1: Layer 0 head 2 after the switch to stable_softmax at step 2,000: not arrested"
        )
        assert "Escalate: exact_delta+stable_softmax" in became
        assert "is proposed (service)" in proposed

    play(story)
