"""Labels of a stranger's making are bounded, and none of them ever becomes a series."""

from typing import Any

import pytest

from foreshock.server.testing import FakeRank


def alert(labels: dict[str, str]) -> dict[str, Any]:
    """A delivery of Alertmanager with one alert."""
    return {"version": "4", "status": "firing", "alerts": [{"status": "firing", "labels": labels}]}


async def result_of(service: Any, labels: dict[str, str]) -> str:
    """What became of the one alert of a delivery, which is answered 200: another alert in it would be acted on."""
    answer = await service.client.post("/v1/webhooks/alertmanager", json=alert(labels))
    assert answer.status_code == 200
    [result] = answer.json()["results"]
    return str(result)


@pytest.mark.promise("S6")
async def test_labels_of_a_run_are_few_and_short_and_stay_out_of_the_metrics(service: Any) -> None:
    rank = FakeRank()
    started = rank.started().model_dump(mode="json")
    for labels in ({f"l{i}": "x" for i in range(33)}, {"l": "x" * 257}, {"l l": "x"}, {"<b>": "x"}, {"l": 1}):
        body = {"wire": 1, "run": "run-1", "rank": 0, "boot": "b1", "sequence": 1}
        answer = await service.client.post("/v1/batches", json={**body, "events": [{**started, "labels": labels}]})
        assert answer.status_code == 422, labels
    series = []
    for number in range(2):
        own = FakeRank(run=f"run-{number}")
        bomb = {f"label{number}-{i}": f"<script>{number}-{i}</script>" + "x" * 200 for i in range(32 * number)}
        await service.store(own, own.started().model_copy(update={"labels": bomb}), own.sample(1))
        text = (await service.client.get("/metrics")).text
        assert "script" not in text
        assert "label1-" not in text
        series.append(sum(f'run="run-{number}"' in line for line in text.splitlines()))
    assert series[0] == series[1] > 0


@pytest.mark.promise("S6")
async def test_an_alert_with_a_thousand_labels_is_refused_and_switches_nothing(service: Any) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(policy="auto"), rank.verdict(1))
    named = {"alertname": "ForeshockHeadFailing", "run": "run-1", "cause": "rounding"}
    for labels in ({**named, **{f"l{i}": "x" for i in range(1000)}}, {**named, "cause": "x" * 1025}):
        assert (await result_of(service, labels)).startswith("refused: labels")
    nul = await result_of(service, {**named, "cause": "rounding\x00"})  # which PostgreSQL cannot keep
    assert nul.startswith("refused: labels.cause: ")
    assert (await service.get("/v1/runs/run-1/commands"))["commands"] == []
    hostile = {**named, "cause": "<img src=x onerror=alert(1)>\n", "signal": "{{ . }}"}
    assert await result_of(service, hostile) == "refused: the run has no open incident of this cause"
    await service.client.post("/v1/webhooks/alertmanager", json=alert({**named, "signal": "{{ . }}\n"}))
    [command] = (await service.get("/v1/runs/run-1/commands"))["commands"]
    assert "\n" not in command["reason"]
    assert "{{" not in command["reason"]
