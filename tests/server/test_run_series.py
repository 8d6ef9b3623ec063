"""The series of a run, by how much they are needed: its alerts, state and step first, and no free text."""

from typing import Any

import pytest
from tests.server.scraped import Shown, runs_of, shown

from foreshock.contract.metrics import metric as labels
from foreshock.contract.wire import AgentHealth, Switched
from foreshock.server.testing import FakeRank


def runs_series(found: Shown) -> list[str]:
    return [name for name, own in found if "run" in dict(own)]


@pytest.mark.promise("S6")
@pytest.mark.settings(max_series=1100)
async def test_warnings_state_and_step_of_every_run_are_shown_before_any_head(service: Any) -> None:
    names = {f"run-{number:03}" for number in range(40)}
    each = 0
    for name in sorted(names):
        rank = FakeRank(run=name, layers=4, heads=range(6))
        await service.store(rank, rank.started(), rank.sample(7), rank.verdict(7, layer=3, head=5, severity="critical"))
        each = each or len(runs_series(await shown(service)))
    found = await shown(service)
    for metric in ("warning_active", "warning_forecast_steps", "incident_active", "run_active", "run_step", "run_loss"):
        assert runs_of(found, f"foreshock_{metric}") == names, metric
    assert len(found) <= 1100 + 2  # and what was left out: series, lines of the log
    assert len(runs_series(found)) + service.app.state.counters.series_dropped == 40 * each
    assert runs_of(found, "foreshock_layer_risk_ratio")  # what is left is spent on layers


@pytest.mark.promise("S6")
async def test_free_text_of_an_agent_becomes_no_label(service: Any) -> None:
    rank = FakeRank(run="noisy")
    await service.store(rank, rank.started(), rank.sample(1))
    before = len(await shown(service))
    for number in range(30):
        told = [rank.verdict(1, name=f"w-{number}-{i}", signal=f"signal {number} {i}") for i in range(5)]
        switched = Switched(
            id=f"s-{number}",
            step=1,
            outcome="refused",
            heads=((0, 1),),
            before=("plain",),
            after=(f"mode_{number}",),
            reason="x",
        )
        lost = AgentHealth(step=1, dropped={f"why-{number}-{i}": 1 for i in range(9)}, faults={f"who-{number}": 1})
        await service.store(rank, *told, switched, lost)
    found = await shown(service)
    assert len(found) - before <= 12
    known = {
        "signal": labels.SIGNALS,
        "reason": labels.DROP_REASONS,
        "component": labels.FAULT_COMPONENTS,
    }
    for _, own in found:
        for label, value in own:
            assert value in {*known.get(label, {value}), labels.OTHER}
    modes = {dict(own)["mode"] for name, own in found if name == "foreshock_switch_outcomes_total"}
    assert modes == {labels.OTHER}


@pytest.mark.promise("S6")
async def test_labels_of_a_run_are_few_and_short_and_stay_out_of_the_metrics(service: Any) -> None:
    rank = FakeRank()
    started = rank.started().model_dump(mode="json")
    for wrong in ({f"l{i}": "x" for i in range(33)}, {"l": "x" * 257}, {"l l": "x"}, {"<b>": "x"}, {"l": 1}):
        body = {"wire": 1, "run": "run-1", "rank": 0, "boot": "b1", "sequence": 1}
        answer = await service.client.post("/v1/batches", json={**body, "events": [{**started, "labels": wrong}]})
        assert answer.status_code == 422, wrong
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
