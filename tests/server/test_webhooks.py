import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.orders import order

from foreshock.contract.wire import Finished, Policy
from foreshock.server.testing import FakeRank


def delivery(status: str = "firing", **changes: str) -> dict[str, Any]:
    """What Alertmanager 0.25 sends, cut to what matters."""
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


async def alert(service: Any, body: dict[str, Any]) -> str:
    answer = await service.client.post("/v1/webhooks/alertmanager", json=body)
    assert answer.status_code == 200, answer.text
    [result] = answer.json()["results"]
    return str(result).split(":")[0]


async def start(service: Any, policy: Policy) -> FakeRank:
    rank = FakeRank()
    warned = [rank.verdict(1, head=head, name=f"warn-{head}") for head in rank.layers[0].heads]
    await service.store(rank, rank.started(policy=policy), rank.sample(1), *warned)
    return rank


@pytest.mark.promise("S9")
@pytest.mark.parametrize(
    ("policy", "result", "states"),
    [("auto", "ordered", ["pending"]), ("approve", "proposed", ["proposed"]), ("observe", "observed", [])],
)
async def test_an_alert_does_what_the_runs_policy_lets_it(
    service: Any, policy: Policy, result: str, states: list[str]
) -> None:
    rank = await start(service, policy)
    assert await alert(service, delivery()) == result
    commands = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert [(c["state"], c["source"], c["heads"], c["mode"]) for c in commands] == [
        (state, "alertmanager", [[0, 0], [0, 1], [0, 2]], "exact_delta") for state in states
    ]
    assert len((await service.store(rank, rank.sample(2))).commands) == (policy == "auto")
    assert (await service.get("/v1/audit"))["rows"][-1]["actor"] == "alertmanager"


@pytest.mark.promise("S9")
@pytest.mark.parametrize("policy", ["auto", "approve"])
async def test_no_alert_orders_a_switch_of_a_run_that_has_ended(service: Any, policy: Policy) -> None:
    rank = await start(service, policy)
    await service.store(rank, Finished(step=2, unix_seconds=2.0, status="failed"))
    body = delivery()
    answer = await service.client.post("/v1/webhooks/alertmanager", json=body)
    assert answer.json()["results"] == ["refused: every rank that holds these heads has ended"]
    assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []


@pytest.mark.promise("S9")
@pytest.mark.parametrize("policy", ["auto", "approve"])
@pytest.mark.parametrize(
    ("cause", "signal", "told"),
    [("other", "nonfinite", "not finite"), ("other", "score", "other"), ("score growth", "score", "score growth")],
)
async def test_no_alert_orders_a_switch_that_cannot_help(
    service: Any, policy: Policy, cause: str, signal: str, told: str
) -> None:
    rank = FakeRank()
    verdict = rank.verdict(1, cause=cause, signal=signal, severity="critical")
    await service.store(rank, rank.started(policy=policy), rank.sample(1), verdict)
    assert await alert(service, delivery(cause=told, signal=signal)) == "observed"
    assert await alert(service, delivery(cause="rounding")) == "refused"  # an alert that the store does not bear out
    assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []
    [incident] = (await service.get("/v1/runs/run-1/incidents"))["incidents"]
    assert incident["act"] == "none"
    assert incident["done"].startswith("No head was switched")


@pytest.mark.full
@pytest.mark.parametrize(("scope", "heads"), [("head", 2), ("layer", 3), ("model", 6)])
async def test_an_alert_about_an_incident_switches_what_the_run_would_switch_by_itself(
    service: Any, scope: str, heads: int
) -> None:
    rank = FakeRank()
    started = rank.started(policy="auto").model_copy(update={"switch_scope": scope})
    warned = [rank.verdict(1, layer=1, head=head, name=f"w{head}") for head in (0, 1)]
    await service.store(rank, started, rank.sample(1), *warned)
    labels = {"state": "open", "act": "switch", "severity": "warning"}
    assert await alert(service, delivery(**labels)) == "ordered"
    [command] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert len(command["heads"]) == heads
    assert (await service.store(rank, rank.sample(2, mode=1))).commands
    assert await alert(service, delivery(**labels | {"state": "switched"})) in ("observed", "duplicate")


async def alerts_of_three_heads(service: Any, after_each: Callable[[], None] = lambda: None) -> list[str]:
    """What came of an alert after each of three heads began to drift; the rank carries out what is ordered."""
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


def test_webhook_switches_have_a_cool_down(play: Any) -> None:
    async def quiet(service: Any) -> None:
        assert await alerts_of_three_heads(service) == ["ordered", "refused", "refused"]
        assert (await service.get("/v1/audit"))["rows"][0]["action"] == "webhook refused"

    async def busy(service: Any) -> None:
        assert await alerts_of_three_heads(service) == ["ordered", "ordered", "ordered"]

    play(quiet)
    play(busy, name="busy", webhook_cooldown_seconds=0)


async def test_a_switch_ordered_by_a_clock_that_was_ahead_holds_up_no_other_once_it_is_right(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, ahead = time.time, [86_400.0]
    monkeypatch.setattr(time, "time", lambda: right() + ahead[0])

    def set_right() -> None:
        ahead[0] = 0.0

    found = await alerts_of_three_heads(service, set_right)
    assert found == ["ordered", "ordered", "refused"]


async def test_an_alert_that_was_refused_for_a_passing_reason_acts_when_it_is_repeated(service: Any) -> None:
    await start(service, "auto")
    other = {"who": "ann", "reason": "to look", "heads": [[0, 0]], "mode": "exact_delta"}
    under_way = (await service.client.post("/v1/runs/run-1/commands", json=other)).json()["id"]
    assert await alert(service, delivery()) == "refused"
    await service.client.post(f"/v1/commands/{under_way}/cancel", json={"who": "ann", "reason": "seen"})
    assert [await alert(service, delivery()) for _ in range(2)] == ["ordered", "duplicate"]


@pytest.mark.promise("S9")
@pytest.mark.settings(webhook_cooldown_seconds=0)
async def test_an_alert_acts_once_for_the_same_heads_and_again_for_a_head_that_joined_its_incident(
    service: Any,
) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="auto"), rank.sample(1), rank.verdict(1, head=0))
    assert [await alert(service, delivery()) for _ in range(3)] == ["ordered", "duplicate", "duplicate"]
    assert await alert(service, delivery("resolved")) == "ignored"
    [sent] = (await service.store(rank, rank.sample(2))).commands
    await service.store(rank, rank.answer(sent, 2), rank.verdict(3, head=1, name="joined"))
    assert [await alert(service, delivery()) for _ in range(2)] == ["ordered", "duplicate"]


async def test_a_head_that_another_mode_has_cured_is_not_switched_again(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="auto"), rank.sample(1), rank.verdict(1))
    await order(service, mode="row_corrected")
    [sent] = (await service.store(rank, rank.sample(2))).commands
    await service.store(rank, rank.answer(sent, 2))
    assert await alert(service, delivery()) == "observed"


async def test_one_odd_alert_holds_up_no_other_of_its_delivery(service: Any) -> None:
    """An Alertmanager does not repeat a delivery that was refused whole."""
    await start(service, "auto")
    [good], [watchdog] = delivery()["alerts"], delivery(alertname="ForeshockWatchdog")["alerts"]
    odd = [good | {"fingerprint": None}, good | {"labels": {"run": "x" * 1025}}, "text", {}]
    unknown = [delivery(alertname="Other")["alerts"][0]] * 1000
    body = delivery() | {"alerts": [*odd, *unknown, watchdog, good]}
    answer = await service.client.post("/v1/webhooks/alertmanager", json=body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert len(results) == len(body["alerts"])
    assert all(one.startswith("refused: ") for one in results[:4])
    assert results[0] == "refused: fingerprint: Input should be a valid string"
    assert set(results[4:-2]) == {"ignored: no action is tied to this alert"}
    assert results[-2:] == ["watchdog", "ordered"]


async def test_an_alert_of_an_incident_that_is_closed_switches_nothing(service: Any) -> None:
    rank = await start(service, "auto")
    quiet = [rank.verdict(2, head=head, name=f"warn-{head}", state="cleared") for head in rank.layers[0].heads]
    await service.store(rank, *quiet)
    told = await service.client.post("/v1/webhooks/alertmanager", json=delivery())
    assert told.json()["results"] == ["refused: the run has no open incident of this cause"]


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"alertname": "SomethingElse"}, "ignored"),
        ({"run": "nobody"}, "refused"),
        ({"run": "<img src=x>"}, "refused"),
        ({"cause": ""}, "refused"),
        ({"cause": "score growth"}, "refused"),
    ],
)
async def test_an_alert_about_nothing_we_know_switches_nothing(
    service: Any, changes: dict[str, str], result: str
) -> None:
    await start(service, "auto")
    assert await alert(service, delivery(**changes)) == result
    assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []


async def test_the_watchdog_is_seen_on_metrics(service: Any) -> None:
    assert await alert(service, delivery(alertname="ForeshockWatchdog")) == "watchdog"
    text = (await service.client.get("/metrics")).text
    [line] = [x for x in text.splitlines() if x.startswith("foreshock_service_watchdog_timestamp_seconds ")]
    assert abs(float(line.split()[1]) - time.time()) < 30


async def test_a_proposal_that_was_rejected_holds_up_none_for_another_head(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="approve"), rank.sample(1), rank.verdict(1, head=0))
    assert await alert(service, delivery()) == "proposed"
    [proposal] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    await service.client.post(f"/v1/commands/{proposal['id']}/reject", json={"who": "ann", "reason": "noise"})
    await service.store(rank, rank.verdict(3, head=1, name="joined"))
    assert await alert(service, delivery()) == "proposed"
    heads = [command["heads"] for command in (await service.get("/v1/runs/run-1/commands"))["commands"]]
    assert heads == [[[0, 1]], [[0, 0]]]
