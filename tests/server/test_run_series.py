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
@pytest.mark.settings(max_series=100)
async def test_alerts_are_shown_even_where_the_budget_is_spent_on_them_alone(service: Any) -> None:
    victim = FakeRank(run="victim")
    await service.store(victim, victim.started(), victim.sample(1), victim.verdict(1, severity="critical"))
    for number in range(60):  # a token that opens runs, each with warnings
        noisy = FakeRank(run=f"noisy-{number}", layers=1)
        raised = [noisy.verdict(1, layer=0, head=head, name=f"w-{head}") for head in range(3)]
        await service.store(noisy, noisy.started(), noisy.sample(1), *raised)
    found = await shown(service)
    for metric in ("warning_active", "run_active", "run_step"):
        assert "victim" in runs_of(found, f"foreshock_{metric}")
    assert len(found) <= 100 + 2


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
