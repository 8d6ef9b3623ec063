"""What follows a switch: it is verified some steps later, escalated when it did not help, and undone on request."""

import json
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import SecretStr

from foreshock.contract.slots import Slot
from foreshock.contract.wire import Array, Command, Policy, Sample, Switched
from foreshock.server.commands.verification import verify
from foreshock.server.notifier import Notifier
from foreshock.server.settings import Settings
from foreshock.server.testing import FakeRank

ORDER = {"who": "ann", "reason": "it drifts", "heads": [[0, 2]], "mode": "exact_delta"}
WHO = {"who": "bob", "reason": "it cost too much"}
WINDOW = 1000


def grown(rank: FakeRank, step: int, rate: float, base: float = 1.0) -> Sample:
    """A sample in which every head's offset and largest score are base * exp(rate * step / WINDOW)."""
    words = rank.words(step)
    floats = words.view(np.float64)
    size = base * np.exp(rate * step / WINDOW)
    floats[:, Slot.SCORE_MAX] = floats[:, Slot.ROW_MAX_ABS] = 12 * size
    floats[:, Slot.SCORE_OFFSET_SUM] = -size * words[:, Slot.ROWS]
    floats[:, Slot.SCORE_OFFSET_SUMSQ] = size**2 * words[:, Slot.ROWS]
    return rank.sample(step, since=step - 20).model_copy(update={"states": Array.of(words)})


async def switched(
    service: Any, policy: Policy = "approve", before: float = 1.0, after: float = 1.0, **order: Any
) -> str:
    """A run whose head grows at one rate, is switched at step 2000, and grows at another for 1000 steps more."""
    rank = FakeRank()
    await service.store(rank, rank.started(policy=policy))
    await service.store(rank, *(grown(rank, step, before) for step in range(20, 2000, 20)))
    command: str = (await service.client.post("/v1/runs/run-1/commands", json={**ORDER, **order})).json()["id"]
    [sent] = (await service.store(rank, grown(rank, 2000, before))).commands
    await service.store(rank, rank.answer(sent, 2000))
    base = np.exp((before - after) * 2)
    await service.store(rank, *(grown(rank, step, after, base) for step in range(2020, 3020, 20)))
    return command


async def judge(service: Any) -> None:
    state = service.app.state
    await verify(state.store, state.settings, state.roller)


async def commands_of(service: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    return found


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
        await judge(service)
        assert [c["source"] for c in await commands_of(service)] == ["api"]

    play(story, webhook_switches_per_hour=0)


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


def answer(rank: FakeRank, command: Command, before: list[str]) -> Switched:
    """The answer of a rank whose heads had different modes."""
    said = rank.answer(command, 30)
    return said.model_copy(update={"before": tuple(before)})


def test_an_applied_switch_is_undone_on_request_head_by_head_to_the_modes_there_were(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started())
        heads = [[0, 0], [0, 1], [0, 2]]
        command = (await service.client.post("/v1/runs/run-1/commands", json={**ORDER, "heads": heads})).json()["id"]
        early = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
        assert (early.status_code, early.json()["detail"]) == (
            409,
            f"Command {command} is pending; only what was applied can be undone.",
        )
        [sent] = (await service.store(rank, rank.sample(10))).commands
        await service.store(rank, answer(rank, sent, ["plain", "stable_softmax", "exact_delta"]))

        undone = await service.client.post(f"/v1/commands/{command}/undo", json=WHO)
        assert undone.status_code == 201
        orders = (await service.store(rank, rank.sample(40))).commands
        assert {(o.mode, o.heads, o.expect) for o in orders} == {
            ("plain", ((0, 0),), "exact_delta"),
            ("stable_softmax", ((0, 1),), "exact_delta"),
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

    play(story)


def test_a_dry_run_of_an_undo_leaves_the_undo_open_and_an_undone_switch_is_not_verified(play: Any) -> None:
    async def story(service: Any) -> None:
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

    play(story)


def test_what_an_agent_switched_by_itself_can_be_undone_as_well(play: Any) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started())
        local = Switched(
            id="local-1",
            step=20,
            outcome="applied",
            heads=((0, 2),),
            before=("plain",),
            after=("exact_delta",),
            reason="x",
        )
        await service.store(rank, local)
        [shown] = await commands_of(service)
        assert (shown["state"], shown["source"]) == ("applied", "rank")
        assert (await service.client.post(f"/v1/commands/{shown['id']}/undo", json=WHO)).status_code == 201
        [sent] = (await service.store(rank, rank.sample(21))).commands
        assert (sent.mode, sent.expect, sent.heads) == ("plain", "exact_delta", ((0, 2),))

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
        settings = Settings(notify_webhook_url=SecretStr(url), notify_hosts=hosts, notify_gather_seconds=0.0)
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


def not_arrested(text: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith('foreshock_switch_not_arrested{run="run-1"}')]
    return float(line.split()[-1])


@pytest.mark.parametrize("what_then", ["undone", "replaced"])
def test_a_switch_that_did_not_arrest_its_heads_is_a_metric_until_it_is_undone_or_replaced(
    play: Any, what_then: str
) -> None:
    async def story(service: Any) -> None:
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

    play(story)
