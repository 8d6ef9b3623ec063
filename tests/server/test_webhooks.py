"""Alerts that request a switch: at most once, within the policy and limits of the run."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.orders import commands_of, order

from foreshock.contract.wire import Finished, Policy
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S9")


def delivery(status: str = "firing", **changes: str) -> dict[str, Any]:
    """The relevant part of a request from Alertmanager 0.25."""
    labels = {"alertname": "ForeshockHeadFailing", "run": "run-1", "cause": "rounding"}
    alert = {
        "status": status,
        "labels": {**labels, **changes},
        "annotations": {"summary": "x"},
        "startsAt": "2026-11-21T11:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": "f1",
    }
    return {"version": "4", "receiver": "foreshock", "status": status, "alerts": [alert], "truncatedAlerts": 0}


async def results(service: Any, body: dict[str, Any]) -> list[str]:
    response = await service.client.post("/v1/webhooks/alertmanager", json=body)
    assert response.status_code == 200, response.text
    found: list[str] = response.json()["results"]
    return found


async def alert(service: Any, body: dict[str, Any]) -> str:
    [result] = await results(service, body)
    return result.split(":")[0]


async def start(service: Any, policy: Policy) -> FakeRank:
    rank = FakeRank()
    warned = [rank.verdict(1, head=head, name=f"warn-{head}") for head in rank.layers[0].heads]
    await service.store(rank, rank.started(policy=policy), rank.sample(1), *warned)
    return rank


@pytest.mark.parametrize(
    ("policy", "result", "states"),
    [("auto", "ordered", ["pending"]), ("approve", "proposed", ["proposed"]), ("observe", "observed", [])],
)
async def test_alert_follows_run_policy_and_is_refused_after_run_end(
    service: Any, policy: Policy, result: str, states: list[str]
) -> None:
    rank = await start(service, policy)
    assert await alert(service, delivery()) == result
    assert [command["state"] for command in await commands_of(service)] == states
    assert (await service.get("/v1/audit"))["rows"][-1]["actor"] == "alertmanager"
    if states:
        await service.store(rank, Finished(step=2, unix_seconds=2.0, status="failed"))
        again = delivery()
        again["alerts"][0]["startsAt"] += "later"
        assert "every rank that could do it has ended" in (await results(service, again))[0]


@pytest.mark.parametrize(
    ("cause", "signal", "label"),
    [("other", "nonfinite", "not finite"), ("other", "score", "other"), ("score growth", "score", "score growth")],
)
async def test_alert_orders_no_switch_that_cannot_help(
    service: Any, rank: FakeRank, cause: str, signal: str, label: str
) -> None:
    verdict = rank.verdict(1, cause=cause, signal=signal, severity="critical")
    await service.store(rank, rank.started(policy="auto"), rank.sample(1), verdict)
    assert await alert(service, delivery(cause=label, signal=signal)) == "observed"
    assert await alert(service, delivery(cause="rounding")) == "refused"  # no such incident is in the store
    assert await commands_of(service) == []


async def alerts_of_three_heads(service: Any, after_each: Callable[[], None] = lambda: None) -> list[str]:
    """The results of alerts after three heads began to drift, one after another; the rank applies every order."""
    rank, found = FakeRank(), []
    await service.store(rank, rank.started(policy="auto"), rank.sample(1))
    for head in range(3):
        await service.store(rank, rank.verdict(2 + head, head=head, name=f"warn-{head}"))
        body = delivery()
        body["alerts"][0]["startsAt"] += str(head)
        found.append(await alert(service, body))
        ordered = (await service.store(rank, rank.sample(2 + head))).commands
        await service.store(rank, rank.sample(3 + head), *(rank.answer(one, 3 + head) for one in ordered))
        after_each()
    return found


@pytest.mark.parametrize(
    ("seconds", "ahead", "found"),
    [
        (300.0, 0.0, ["ordered", "refused", "refused"]),
        (0.0, 0.0, ["ordered"] * 3),
        (300.0, 86_400.0, ["ordered", "ordered", "refused"]),
    ],
    ids=["cooldown", "no cooldown", "ordered while the clock was ahead"],
)
def test_switches_ordered_by_webhooks_have_a_cooldown(
    run_scenario: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, ahead: float, found: list[str]
) -> None:
    correct_time, clock = time.time, [ahead]
    monkeypatch.setattr(time, "time", lambda: correct_time() + clock[0])

    async def scenario(service: Any) -> None:
        assert await alerts_of_three_heads(service, lambda: clock.__setitem__(0, 0.0)) == found

    run_scenario(scenario, webhook_cooldown_seconds=seconds)


async def test_alert_refused_because_of_open_order_acts_once_when_repeated(
    service: Any,
) -> None:
    await start(service, "auto")
    open_order = (await order(service, heads=[[0, 0]])).json()["id"]
    assert await alert(service, delivery()) == "refused"
    await service.client.post(f"/v1/commands/{open_order}/cancel", json={"who": "ann", "reason": "seen"})
    assert [await alert(service, delivery()) for _ in range(2)] == ["ordered", "duplicate"]


@pytest.mark.settings(webhook_cooldown_seconds=0)
async def test_alert_acts_once_and_again_only_when_a_head_joins_the_incident(
    service: Any,
    rank: FakeRank,
) -> None:
    await service.store(rank, rank.started(policy="auto"), rank.sample(1), rank.verdict(1, head=0))
    assert [await alert(service, delivery()) for _ in range(2)] == ["ordered", "duplicate"]
    assert await alert(service, delivery("resolved")) == "ignored"
    [sent] = (await service.store(rank, rank.sample(2))).commands
    await service.store(rank, rank.answer(sent, 2), rank.verdict(3, head=1, name="joined"))
    assert [await alert(service, delivery()) for _ in range(2)] == ["ordered", "duplicate"]


async def test_rejected_proposal_starts_no_cooldown(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(policy="approve"), rank.sample(1), rank.verdict(1, head=0))
    assert await alert(service, delivery()) == "proposed"
    [proposal] = await commands_of(service)
    await service.client.post(f"/v1/commands/{proposal['id']}/reject", json={"who": "ann", "reason": "bad data"})
    await service.store(rank, rank.verdict(2, head=1, name="joined"))
    assert await alert(service, delivery()) == "proposed"
    assert [one["heads"] for one in await commands_of(service)] == [[[0, 1]], [[0, 0]]], (
        "the second proposal contains only the other head"
    )


async def test_head_switched_to_other_mode_is_not_switched_again(service: Any, rank: FakeRank) -> None:
    await service.store(rank, rank.started(policy="auto"), rank.sample(1), rank.verdict(1))
    await order(service, mode="row_corrected")
    [sent] = (await service.store(rank, rank.sample(2))).commands
    await service.store(rank, rank.answer(sent, 2))
    assert await alert(service, delivery()) == "observed"


async def test_invalid_alert_does_not_block_others_in_same_delivery(service: Any) -> None:
    """Alertmanager does not repeat a delivery that was refused as a whole."""
    await start(service, "auto")
    [good], [watchdog] = delivery()["alerts"], delivery(alertname="ForeshockWatchdog")["alerts"]
    invalid = [good | {"fingerprint": None}, good | {"labels": {"run": "x" * 1025}}, "text", {}]
    unknown = [delivery(alertname="Other")["alerts"][0]] * 1000
    found = await results(service, delivery() | {"alerts": [*invalid, *unknown, watchdog, good]})
    assert len(found) == 1006
    assert all(one.startswith("refused: ") for one in found[:4])
    assert found[0] == "refused: fingerprint: Input should be a valid string"
    assert set(found[4:-2]) == {"ignored: no action is tied to this alert"}
    assert found[-2:] == ["watchdog", "ordered"]
    [line] = [
        line
        for line in (await service.client.get("/metrics")).text.splitlines()
        if line.startswith("foreshock_service_watchdog_timestamp_seconds ")
    ]
    assert abs(float(line.split()[1]) - time.time()) < 30


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"alertname": "SomethingElse"}, "ignored: no action is tied to this alert"),
        ({"run": "<img src=x>"}, "refused: there is no run with this name"),
        ({"cause": ""}, "refused: the run has no open incident of this cause"),
        ({}, "refused: the run has no open incident of this cause"),
    ],
    ids=["another alert", "another run", "no cause", "an incident that is closed"],
)
async def test_alert_without_matching_open_incident_switches_nothing(
    service: Any, changes: dict[str, str], result: str
) -> None:
    rank = await start(service, "auto")
    if not changes:
        heads = rank.layers[0].heads
        await service.store(rank, *(rank.verdict(2, head=h, name=f"warn-{h}", state="cleared") for h in heads))
    assert await results(service, delivery(**changes)) == [result]
    assert await commands_of(service) == []
