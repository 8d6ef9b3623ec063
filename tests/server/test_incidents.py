"""Incidents of a run, made from the warnings of all ranks, and the plan to resume a failed run."""

import re
from typing import Any

import pytest
from tests.server.orders import ORDER, local, start
from tests.server.test_notifier import FakeOutgoing, notifier_of
from tests.server.test_webhooks import alert, delivery

from foreshock.contract.modes import parse_mode
from foreshock.contract.wire import Checkpoint, Verdict
from foreshock.server.testing import FakeRank

HEADS = tuple(range(12))
RUN = "/v1/runs/run-1"


async def incidents(service: Any, run: str = "run-1") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await service.get(f"/v1/runs/{run}/incidents"))["incidents"]
    return found


async def test_event_log_repeats_incident_only_when_worse_or_much_larger(service: Any) -> None:
    rank = FakeRank(layers=12, heads=HEADS)
    await service.store(rank, rank.started(policy="observe"), rank.sample(10))
    for layer in range(12):
        verdicts = [rank.verdict(20 + layer, layer=layer, head=h, name=f"l{layer}h{h}") for h in HEADS]
        await service.store(rank, *verdicts)
    await service.store(rank, rank.verdict(40, layer=3, head=3, name="l3h3", state="updated", severity="critical"))
    await service.store(rank, rank.verdict(41, layer=3, head=3, name="l3h3", state="updated", severity="critical"))
    logged = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    log = [(e["incident"]["standing"], e["incident"]["severity"]) for e in reversed(logged)]
    assert log == [(12, "warning"), (108, "warning"), (144, "critical")]
    every = (await service.get(f"{RUN}/events", limit=500))["events"]
    assert {event["kind"] for event in every} == {"started", "verdict", "incident"}
    [short] = (await service.get(RUN))["incidents"]
    assert (short["id"], short["standing"], short["state"]) == ("rounding", 144, "open")
    [row] = (await service.get("/v1/runs"))["runs"]
    assert row["incidents"] == [short]


async def test_incident_is_acknowledged_switched_and_closed(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), rank.verdict(5))
    assert [i["state"] for i in await incidents(service)] == ["open"]
    acknowledgement = {"who": "ann", "reason": "on it", "incident": "rounding"}
    response = await service.client.post(f"{RUN}/acknowledge", json=acknowledgement)
    assert response.status_code == 200, response.text
    assert (response.json()["state"], response.json()["acknowledged"]["reason"]) == ("acknowledged", "on it")
    order = {"who": "ann", "reason": "drift", "heads": [[0, 2]], "mode": "row_corrected"}
    await service.client.post(f"{RUN}/commands", json=order)
    [command] = (await service.store(rank, rank.sample(6))).commands
    await service.store(rank, rank.answer(command, 7), rank.sample(7, mode=8))
    [incident] = await incidents(service)
    assert (incident["state"], incident["switched"]) == ("switched", 1)
    assert re.fullmatch(
        r"The head is switched\. Ordered by ann \(.*\) at \d\d:\d\d UTC, delivered, applied\.", incident["done"]
    )
    await service.store(rank, rank.verdict(9, state="cleared"))
    [incident] = await incidents(service)
    assert (incident["state"], incident["closed_step"]) == ("closed", 9)
    assert (await service.get(RUN))["incidents"] == []
    logged = (await service.get(f"{RUN}/events", kind=["incident", "acknowledged"]))["events"]
    assert [e["incident"]["state"] if e["incident"] else e["kind"] for e in reversed(logged)] == [
        "open",
        "acknowledged",
        "acknowledged",
        "switched",
        "closed",
    ]
    assert any(row["action"] == "acknowledged" for row in (await service.get("/v1/audit"))["rows"])
    again = await service.client.post(f"{RUN}/acknowledge", json=acknowledgement)
    assert again.status_code == 409
    unknown = await service.client.post(f"{RUN}/acknowledge", json=acknowledgement | {"incident": "other"})
    assert unknown.status_code == 404


@pytest.mark.promise("S27")
async def test_warning_of_rank_dropped_by_resume_is_in_no_incident(service: Any) -> None:
    first, second = (FakeRank(rank=rank, boot="b1") for rank in range(2))
    for rank in (first, second):
        await service.store(rank, rank.started(world_size=2), rank.sample(10, since=0))
    await service.store(second, second.verdict(10))
    assert len(await incidents(service)) == 1
    resumed = FakeRank(boot="b2")
    await service.store(resumed, resumed.started(step=15, world_size=1), resumed.sample(20, since=15))
    assert await incidents(service) == []


async def test_metrics_have_one_series_per_run_and_cause(service: Any) -> None:
    rank = FakeRank(layers=3, heads=HEADS)
    await service.store(rank, rank.started(policy="approve"), rank.sample(10))
    verdicts = [rank.verdict(20, layer=layer, head=h, name=f"l{layer}h{h}") for layer in range(3) for h in HEADS]
    nan = rank.verdict(20, name="run-20", cause="other", signal="nonfinite", severity="critical", forecast_steps=None)
    await service.store(rank, *verdicts, nan.model_copy(update={"layer": None, "head": None}), rank.sample(21))
    lines = [x for x in (await service.client.get("/metrics")).text.splitlines() if x.startswith("foreshock_inc")]
    words = [lines.pop(at) for at in reversed(range(len(lines))) if "_words{" in lines[at]]
    labels = 'act="{}",cause="{}",run="run-1",severity="{}",state="open"'
    assert sorted(lines) == [
        'foreshock_incident_acknowledged{cause="not finite",run="run-1"} 0.0',
        'foreshock_incident_acknowledged{cause="rounding",run="run-1"} 0.0',
        f"foreshock_incident_active{{{labels.format('none', 'not finite', 'critical')}}} 1.0",
        f"foreshock_incident_active{{{labels.format('propose', 'rounding', 'warning')}}} 1.0",
        'foreshock_incident_forecast_steps{cause="rounding",run="run-1"} 2099.0',
        'foreshock_incident_heads{cause="not finite",run="run-1"} 0.0',
        'foreshock_incident_heads{cause="rounding",run="run-1"} 36.0',
        'foreshock_incident_opened_step{cause="not finite",run="run-1"} 20.0',
        'foreshock_incident_opened_step{cause="rounding",run="run-1"} 20.0',
    ]
    assert len(words) == 2
    [rounding] = [line for line in words if 'cause="rounding"' in line]
    assert 'heads="36 heads of layers 0 to 2"' in rounding
    assert "Type: foreshock switch run-1 --mode exact_delta" in rounding  # there is no proposal yet


async def test_later_sample_overrides_mode_of_earlier_switch(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), rank.verdict(5))
    await service.store(rank, local("applied", step=5))
    assert [one["state"] for one in await incidents(service)] == ["switched"]
    await service.store(rank, rank.sample(6, mode=0))
    assert [one["state"] for one in await incidents(service)] == ["open"]


async def test_milder_incident_is_not_logged_again(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), rank.verdict(5, severity="critical"))
    await service.store(rank, rank.verdict(6, state="updated", severity="warning"))
    assert [one["severity"] for one in await incidents(service)] == ["warning"]
    logged = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    assert [event["incident"]["severity"] for event in logged] == ["critical"]


async def test_mitigation_reverted_by_training_may_be_ordered_again(service: Any, rank: FakeRank) -> None:
    """A mitigation that a person reverted must not be ordered again; see test_decision_effects.py."""
    await service.store(rank, rank.started(policy="auto"), rank.sample(5), rank.verdict(5))
    reverted = local("applied", "local-2", 6, after="plain", verdict=None)
    await service.store(rank, reverted.model_copy(update={"before": ("exact_delta",)}))
    assert await alert(service, delivery()) == "ordered"


def growth(rank: FakeRank, step: int, **changes: Any) -> Verdict:
    return rank.verdict(step, cause="score growth", signal="score", **changes)


def corrected(rank: FakeRank, step: int) -> Verdict:
    return rank.verdict(step, state="updated", corrected_from="score growth", corrected_step=9)


async def log_of(service: Any) -> list[tuple[str, str]]:
    events = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    return [(each["incident"]["cause"], each["incident"]["state"]) for each in reversed(events)]


async def test_corrected_cause_keeps_one_incident_that_later_growth_joins(
    service: Any,
) -> None:
    out, rank = FakeOutgoing(), FakeRank(heads=(0, 1, 2))
    notifier = await notifier_of(service, out)
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), growth(rank, 5))
    await notifier.turn()
    assert "foreshock_incident_corrected_step{" not in (await service.client.get("/metrics")).text
    await service.store(rank, rank.sample(9), corrected(rank, 9))
    for _ in range(2):
        await notifier.turn()
    [incident] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (incident["cause"], incident["opened_step"], incident["ask"]) == ("rounding", 5, "switch")
    assert (incident["corrected_from"], incident["corrected_step"]) == ("score growth", 9)
    assert "until step 9 this was reported as score growth" in incident["sentence"]
    detail = await service.get(RUN)
    assert [one["corrected_from"] for one in detail["incidents"]] == ["score growth"]
    assert detail["warnings"][0]["corrected_step"] == 9
    first, second = out.sent
    assert ("Corrected" in first, "To do: Lower the learning rate" in first) == (False, True)
    assert "Corrected: until step 9 this was reported as score growth." in second
    assert "To do: Switch every head" in second
    lines = (await service.client.get("/metrics")).text.splitlines()
    assert sorted(one for one in lines if one.startswith(("foreshock_incident_cor", "foreshock_incident_active"))) == [
        'foreshock_incident_active{act="none",cause="rounding",run="run-1",severity="warning",state="open"} 1.0',
        'foreshock_incident_corrected_step{cause="rounding",run="run-1",was="score growth"} 9.0',
    ]
    log = [("score growth", "open"), ("rounding", "open"), ("score growth", "closed")]
    assert await log_of(service) == log
    await service.store(rank, rank.sample(10), corrected(rank, 10))
    assert await log_of(service) == log
    await service.store(rank, rank.sample(12), growth(rank, 12, head=1, name="warn-2"))
    assert await log_of(service) == [*log, ("rounding", "open")]
    [found] = (await service.get(f"{RUN}/incidents"))["incidents"]
    assert (found["id"], found["causes"], found["standing"]) == ("rounding", ["rounding", "score growth"], 2)
    assert (await service.get(RUN))["incidents"][0]["causes"] == found["causes"]


PLAN = "/v1/runs/run-1/resume-plan"


def checkpoint(step: int, *, requested: bool = False) -> Checkpoint:
    return Checkpoint(step=step, path=f"out/checkpoint-{step}", trainer="transformers", requested=requested)


async def test_resume_plan_names_last_clean_checkpoint_and_log_lists_each(service: Any, rank: FakeRank) -> None:
    await start(service, rank, policy="observe")
    assert "need not be resumed" in (await service.get(PLAN))["sentence"]
    await service.store(rank, checkpoint(10), rank.verdict(20), checkpoint(25, requested=True))
    plan = await service.get(PLAN)
    assert plan["commands"][0] == 'trainer.train(resume_from_checkpoint="out/checkpoint-10")'
    assert [(one["step"], one["label"], one["pinned"]) for one in plan["checkpoints"]] == [
        (25, "after a warning", False),
        (10, "clean", True),
    ]
    [event, _] = (await service.get("/v1/runs/run-1/events", kind="checkpoint"))["events"]
    assert event["checkpoint"]["requested"]
    assert event["sentence"] == ("Checkpoint of step 25: out/checkpoint-25. foreshock asked for it at a warning.")


async def test_resume_plan_excludes_checkpoints_after_the_resume_step(service: Any) -> None:
    first = FakeRank()
    await start(service, first, policy="observe")
    await service.store(first, checkpoint(10), checkpoint(30), first.verdict(35))
    again = FakeRank(boot="b2")
    await service.store(again, again.started(step=20, policy="observe"), again.sample(25))
    assert [one["step"] for one in (await service.get(PLAN))["checkpoints"]] == [10]


async def test_incident_is_switched_once_when_ranks_switch_at_different_steps(service: Any) -> None:
    ranks = FakeRank(rank=0), FakeRank(rank=1)
    await start(service, *ranks, policy="approve")
    for rank in ranks:
        await service.store(rank, rank.sample(90), rank.verdict(90))
    await service.client.post(f"{RUN}/commands", json=ORDER | {"mode": "row_corrected"})
    orders = [(await service.store(rank, rank.sample(100))).commands[0] for rank in ranks]
    switched = int(parse_mode("row_corrected"))
    await service.store(ranks[0], ranks[0].answer(orders[0], 104), ranks[0].sample(110, mode=switched))
    await service.store(ranks[1], ranks[1].sample(110), ranks[1].answer(orders[1], 112))
    for rank in ranks:
        await service.store(rank, rank.sample(120, mode=switched))
    logged = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    assert [event["incident"]["state"] for event in reversed(logged)] == ["open", "switched"]
