"""One voice for a run: the service gathers what every rank warns about, on every read and from every store."""

import re
from typing import Any

from tests.server.orders import local
from tests.server.test_webhooks import alert, delivery

from foreshock.server.testing import FakeRank

HEADS = tuple(range(12))
RUN = "/v1/runs/run-1"


async def incidents(service: Any, run: str = "run-1") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await service.get(f"/v1/runs/{run}/incidents"))["incidents"]
    return found


async def test_the_log_tells_of_a_flood_once_and_again_only_when_it_turns_worse_or_grows_tenfold(service: Any) -> None:
    rank = FakeRank(layers=12, heads=HEADS)
    await service.store(rank, rank.started(policy="observe"), rank.sample(10))
    for layer in range(12):
        told = [rank.verdict(20 + layer, layer=layer, head=h, name=f"l{layer}h{h}") for h in HEADS]
        await service.store(rank, *told)
    await service.store(rank, rank.verdict(40, layer=3, head=3, name="l3h3", state="updated", severity="critical"))
    await service.store(rank, rank.verdict(41, layer=3, head=3, name="l3h3", state="updated", severity="critical"))
    said = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    log = [(e["incident"]["standing"], e["incident"]["severity"]) for e in reversed(said)]
    assert log == [(12, "warning"), (108, "warning"), (144, "critical")]
    every = (await service.get(f"{RUN}/events", limit=500))["events"]
    assert {event["kind"] for event in every} == {"started", "verdict", "incident"}
    [short] = (await service.get(RUN))["incidents"]
    assert (short["id"], short["standing"], short["state"]) == ("rounding", 144, "open")
    [row] = (await service.get("/v1/runs"))["runs"]
    assert row["incidents"] == [short]


async def test_an_incident_is_acknowledged_switched_verified_and_closed(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), rank.verdict(5))
    assert [i["state"] for i in await incidents(service)] == ["open"]
    care = {"who": "ann", "reason": "on it", "incident": "rounding"}
    answer = await service.client.post(f"{RUN}/acknowledge", json=care)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["state"], answer.json()["acknowledged"]["reason"]) == ("acknowledged", "on it")
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
    said = (await service.get(f"{RUN}/events", kind=["incident", "acknowledged"]))["events"]
    assert [e["incident"]["state"] if e["incident"] else e["kind"] for e in reversed(said)] == [
        "open",
        "acknowledged",
        "acknowledged",
        "switched",
        "closed",
    ]
    assert any(row["action"] == "acknowledged" for row in (await service.get("/v1/audit"))["rows"])
    again = await service.client.post(f"{RUN}/acknowledge", json=care)
    assert again.status_code == 409
    unknown = await service.client.post(f"{RUN}/acknowledge", json=care | {"incident": "other"})
    assert unknown.status_code == 404


async def test_metrics_show_one_series_for_a_run_and_cause(service: Any) -> None:
    rank = FakeRank(layers=3, heads=HEADS)
    await service.store(rank, rank.started(policy="approve"), rank.sample(10))
    told = [rank.verdict(20, layer=layer, head=h, name=f"l{layer}h{h}") for layer in range(3) for h in HEADS]
    nan = rank.verdict(20, name="run-20", cause="other", signal="nonfinite", severity="critical", forecast_steps=None)
    await service.store(rank, *told, nan.model_copy(update={"layer": None, "head": None}), rank.sample(21))
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
    assert "Type: foreshock switch run-1 --mode exact_delta" in rounding  # no proposal waits yet


async def test_what_a_later_sample_shows_of_a_mode_counts_more_than_an_order_before_it(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), rank.verdict(5))
    await service.store(rank, local("applied", step=5))
    assert [one["state"] for one in await incidents(service)] == ["switched"]
    await service.store(rank, rank.sample(6, mode=0))
    assert [one["state"] for one in await incidents(service)] == ["open"]


async def test_an_incident_that_turns_milder_is_no_news(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="observe"), rank.sample(5), rank.verdict(5, severity="critical"))
    await service.store(rank, rank.verdict(6, state="updated", severity="warning"))
    assert [one["severity"] for one in await incidents(service)] == ["warning"]
    said = (await service.get(f"{RUN}/events", kind="incident"))["events"]
    assert [event["incident"]["severity"] for event in said] == ["critical"]


async def test_a_mitigation_that_the_training_took_away_itself_may_be_given_again(service: Any) -> None:
    """Unlike one that a person took away by an order."""
    rank = FakeRank()
    await service.store(rank, rank.started(policy="auto"), rank.sample(5), rank.verdict(5))
    back = local("applied", "local-2", 6, after="plain", verdict=None)
    await service.store(rank, back.model_copy(update={"before": ("exact_delta",)}))
    assert await alert(service, delivery()) == "ordered"
