import hashlib
import hmac
import json
import time
from typing import Any

import pytest

from foreshock.contract.wire import Finished, Policy
from foreshock.server.testing import FakeRank

SECRET = "the-secret-of-grafana-0001"


def delivery(status: str = "firing", **changes: str) -> dict[str, Any]:
    """What Alertmanager 0.25 sends, cut to what matters."""
    labels = {"alertname": "ForeshockHeadFailing", "run": "run-1", "layer": "0", "head": "2", "cause": "rounding"}
    alert = {
        "status": status,
        "labels": {**labels, **changes},
        "annotations": {"summary": "x"},
        "startsAt": "2026-11-21T11:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": "f1" + changes.get("head", ""),
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
def test_an_alert_does_what_the_runs_policy_lets_it(play: Any, policy: Policy, result: str, states: list[str]) -> None:
    async def story(service: Any) -> None:
        rank = await start(service, policy)
        assert await alert(service, delivery()) == result
        commands = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert [(c["state"], c["source"], c["heads"], c["mode"]) for c in commands] == [
            (state, "alertmanager", [[0, 2]], "exact_delta") for state in states
        ]
        assert len((await service.store(rank, rank.sample(2))).commands) == (policy == "auto")
        assert (await service.get("/v1/audit"))["rows"][-1]["actor"] == "alertmanager"

    play(story)


@pytest.mark.promise("S9")
def test_an_alert_acts_once_however_often_it_is_delivered(play: Any) -> None:
    async def story(service: Any) -> None:
        await start(service, "auto")
        results = [await alert(service, delivery()) for _ in range(3)]
        assert results == ["ordered", "duplicate", "duplicate"]
        assert await alert(service, delivery("resolved")) == "ignored"
        assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1

    play(story)


@pytest.mark.promise("S9")
@pytest.mark.parametrize("policy", ["auto", "approve"])
def test_no_alert_orders_a_switch_of_a_run_that_has_ended(play: Any, policy: Policy) -> None:
    async def story(service: Any) -> None:
        rank = await start(service, policy)
        await service.store(rank, Finished(step=2, unix_seconds=2.0, status="failed"))
        body = delivery()
        answer = await service.client.post("/v1/webhooks/alertmanager", json=body)
        assert answer.json()["results"] == ["refused: every rank that holds these heads has ended"]
        assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []

    play(story)


@pytest.mark.promise("S9")
@pytest.mark.parametrize("policy", ["auto", "approve"])
@pytest.mark.parametrize(
    ("cause", "signal", "told"),
    [("other", "nonfinite", "not finite"), ("other", "score", "other"), ("score growth", "score", "score growth")],
)
def test_no_alert_orders_a_switch_that_cannot_help(
    play: Any, policy: Policy, cause: str, signal: str, told: str
) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        verdict = rank.verdict(1, cause=cause, signal=signal, severity="critical")
        await service.store(rank, rank.started(policy=policy), rank.sample(1), verdict)
        assert await alert(service, delivery(cause=told, signal=signal)) == "observed"
        assert await alert(service, delivery(cause=told, layer="", head="")) == "observed"
        assert (
            await alert(service, delivery(cause="rounding")) == "refused"
        )  # an alert that the store does not bear out
        assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []
        [incident] = (await service.get("/v1/runs/run-1/incidents"))["incidents"]
        assert incident["act"] == "none"
        assert incident["done"].startswith("Nothing is switched")

    play(story)


@pytest.mark.parametrize(("scope", "heads"), [("head", 2), ("layer", 3), ("model", 6)])
def test_an_alert_about_an_incident_switches_what_the_run_would_switch_by_itself(
    play: Any, scope: str, heads: int
) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        started = rank.started(policy="auto").model_copy(update={"switch_scope": scope})
        warned = [rank.verdict(1, layer=1, head=head, name=f"w{head}") for head in (0, 1)]
        await service.store(rank, started, rank.sample(1), *warned)
        labels = {"layer": "", "head": "", "state": "open", "act": "switch", "severity": "warning"}
        assert await alert(service, delivery(**labels)) == "ordered"
        [command] = (await service.get("/v1/runs/run-1/commands"))["commands"]
        assert len(command["heads"]) == heads
        assert (await service.store(rank, rank.sample(2, mode=1))).commands
        assert await alert(service, delivery(**labels | {"state": "switched"})) in ("observed", "duplicate")

    play(story)


def test_webhook_switches_have_a_cool_down_and_an_hourly_bound(play: Any) -> None:
    async def story(service: Any) -> None:
        await start(service, "auto")
        assert await alert(service, delivery(head="0")) == "ordered"
        assert await alert(service, delivery(head="1")) == "refused"
        assert next(row["action"] for row in (await service.get("/v1/audit"))["rows"]) == "webhook refused"

    async def busy(service: Any) -> None:
        await start(service, "auto")
        results = [await alert(service, delivery(head=str(head))) for head in range(3)]
        assert results == ["ordered", "ordered", "refused"]

    play(story)
    play(busy, name="busy", webhook_cooldown_seconds=0, webhook_switches_per_hour=2)


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"alertname": "SomethingElse"}, "ignored"),
        ({"run": "nobody"}, "refused"),
        ({"run": "<img src=x>"}, "refused"),
        ({"layer": "9"}, "refused"),
        ({"head": ""}, "refused"),
        ({"head": "-1"}, "refused"),
        ({"head": "\u0662"}, "refused"),
    ],
)
def test_an_alert_about_nothing_we_know_switches_nothing(play: Any, changes: dict[str, str], result: str) -> None:
    async def story(service: Any) -> None:
        await start(service, "auto")
        assert await alert(service, delivery(**changes)) == result
        assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []

    play(story)


def test_the_watchdog_is_seen_on_metrics(play: Any) -> None:
    async def story(service: Any) -> None:
        assert await alert(service, delivery(alertname="ForeshockWatchdog")) == "watchdog"
        text = (await service.client.get("/metrics")).text
        [line] = [x for x in text.splitlines() if x.startswith("foreshock_service_watchdog_timestamp_seconds ")]
        assert abs(float(line.split()[1]) - time.time()) < 30

    play(story)


def sign(body: bytes, secret: str = SECRET, stamp: str | None = None) -> dict[str, str]:
    signed = body if stamp is None else stamp.encode() + b":" + body
    headers = {
        "content-type": "application/json",
        "x-grafana-alerting-signature": hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest(),
    }
    return headers if stamp is None else {**headers, "x-grafana-alerting-signature-timestamp": stamp}


BODY = json.dumps({**delivery(), "version": "1", "orgId": 1, "state": "alerting"}).encode()


@pytest.mark.promise("S9")
def test_grafanas_signed_delivery_acts_and_a_replay_does_not(play: Any) -> None:
    async def story(service: Any) -> None:
        await start(service, "auto")

        async def post(headers: dict[str, str], body: bytes = BODY) -> int:
            answer = await service.client.post("/v1/webhooks/grafana", content=body, headers=headers)
            return int(answer.status_code)

        now = str(int(time.time()))
        assert await post(sign(BODY, stamp=now)) == 200
        assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1
        assert await post(sign(BODY, stamp=now)) == 409
        noted = (await service.get("/v1/audit"))["rows"][0]
        assert (noted["actor"], noted["action"]) == ("grafana", "webhook refused")
        assert noted["details"] == {"why": "This delivery was received before and is not applied again."}
        assert await post(sign(BODY)) == 200
        assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1

    play(story, grafana_hmac_secret=SECRET)


@pytest.mark.promise("S9")
def test_forged_old_future_and_doubled_signatures_are_refused_and_noted(play: Any) -> None:
    now = int(time.time())
    good = sign(BODY)
    cases: dict[str, Any] = {
        "altered body": (good, BODY.replace(b"run-1", b"run-2")),
        "another secret": (sign(BODY, "another-secret-000000"), BODY),
        "missing": ({"content-type": "application/json"}, BODY),
        "upper case": ({**good, "x-grafana-alerting-signature": good["x-grafana-alerting-signature"].upper()}, BODY),
        "old": (sign(BODY, stamp=str(now - 301)), BODY),
        "future": (sign(BODY, stamp=str(now + 400)), BODY),
        "no time": (sign(BODY, stamp="soon"), BODY),
        "two signatures": ([*good.items(), ("x-grafana-alerting-signature", "0" * 64)], BODY),
        "unsigned time": ({**good, "x-grafana-alerting-signature-timestamp": str(now)}, BODY),
    }

    async def story(service: Any) -> None:
        await start(service, "auto")
        for name, (headers, body) in cases.items():
            answer = await service.client.post("/v1/webhooks/grafana", content=body, headers=headers)
            assert answer.status_code == 401, name
        assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []
        rows = (await service.get("/v1/audit"))["rows"]
        assert [(row["actor"], row["action"]) for row in rows] == [("grafana", "webhook refused")] * len(cases)

    play(story, grafana_hmac_secret=SECRET)


@pytest.mark.promise("S9")
def test_a_flood_of_forgeries_is_counted_and_not_written_down_one_by_one(play: Any) -> None:
    async def story(service: Any) -> None:
        for _ in range(60):
            answer = await service.client.post("/v1/webhooks/grafana", content=BODY, headers=sign(BODY, "another" * 4))
            assert answer.status_code == 401
        rows = (await service.get("/v1/audit", limit=100))["rows"]
        assert 10 < len(rows) < 40
        counted = service.app.state.counters.webhooks
        assert counted["grafana", "refused"] == 60

    play(story, grafana_hmac_secret=SECRET)


def test_without_a_secret_grafanas_route_is_closed(play: Any) -> None:
    async def story(service: Any) -> None:
        answer = await service.client.post("/v1/webhooks/grafana", content=BODY, headers=sign(BODY))
        assert answer.status_code == 403

    play(story)


@pytest.mark.promise("S9")
def test_a_signed_delivery_that_failed_is_taken_when_it_comes_again(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(service: Any) -> None:
        await start(service, "auto")
        body = json.dumps(delivery()).encode()
        headers = {"content-type": "application/json", **sign(body, stamp=str(int(time.time())))}

        async def send() -> int:
            answer = await service.client.post("/v1/webhooks/grafana", content=body, headers=headers)
            return int(answer.status_code)

        with monkeypatch.context() as broken:

            async def fails(*_: Any) -> str:
                raise OSError("the disk is full")

            broken.setattr("foreshock.server.http.webhooks._act", fails)
            assert await send() >= 500
        assert [await send(), await send()] == [200, 409]
        assert len((await service.get("/v1/runs/run-1/commands"))["commands"]) == 1

    play(story, grafana_hmac_secret=SECRET)
