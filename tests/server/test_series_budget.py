"""The series budget: alerts come first, no token spends for the others, and no free text is a label."""

from typing import Any

import pytest
from tests.server.scraped import Shown, runs_of, shown

from foreshock.contract.metrics import metric as labels
from foreshock.contract.wire import AgentHealth, Finished, Switched
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank


@pytest.mark.promise("S15")
async def test_only_runs_that_changed_are_read_again_for_a_scrape(service: Any) -> None:
    ranks = [FakeRank(run=f"run-{number}") for number in range(6)]
    for rank in ranks:
        await service.store(rank, rank.started(), rank.sample(1))
    first = await shown(service)
    read: list[int] = []
    exposer = service.app.state.exposer
    look = exposer.read_changed

    def counted(connection: Any, rows: Any) -> Any:
        read.extend(row.id for row in rows)
        return look(connection, rows)

    exposer.read_changed = counted
    assert await shown(service) == first
    assert read == []
    await service.store(ranks[3], ranks[3].sample(2), ranks[3].verdict(2))
    text = (await service.client.get("/metrics")).text
    assert 'foreshock_run_step{run="run-3"} 2.0' in text
    assert "foreshock_warning_active{" in text
    assert len(read) == 1
    ended = Finished(step=3, unix_seconds=1.0, status="completed")
    await service.store(ranks[3], ended)
    gone = await service.client.delete("/v1/runs/run-3", params={"who": "ann", "reason": "no longer needed"})
    assert gone.status_code == 204
    assert "run-3" not in runs_of(await shown(service), "foreshock_run_step")
    assert len(exposer._made) == 5, "nothing of a run that is deleted stays in memory"


@pytest.mark.promise("S6")
def test_a_tenant_with_many_runs_takes_no_series_from_another_that_came_later(play: Any) -> None:
    crowd, other = "crowd-secret-of-one", "other-secret-of-two"
    tokens = (
        Token.of("crowd", crowd, ("ingest",), "crowd/"),
        Token.of("other", other, ("ingest", "read"), "other/"),
        Token.of("all", "all-secret-of-three", ("read",)),
    )

    async def story(service: Any) -> None:
        for number in range(60):
            service.client.headers["authorization"] = f"Bearer {crowd}"
            noisy = FakeRank(run=f"crowd/{number:02}", layers=1)
            await service.store(noisy, noisy.started(), noisy.sample(1), noisy.verdict(1, layer=0))
        service.client.headers["authorization"] = f"Bearer {other}"
        victim = FakeRank(run="other/victim")
        await service.store(victim, victim.started(), victim.sample(1), victim.verdict(1, severity="critical"))
        own = await shown(service)
        assert {dict(labels).get("run", "other/victim") for _, labels in own} == {"other/victim"}
        service.client.headers["authorization"] = "Bearer all-secret-of-three"
        found = await shown(service)
        for metric in ("warning_active", "run_active", "run_step"):
            assert "other/victim" in runs_of(found, f"foreshock_{metric}"), metric
        assert len(found) <= 100 + 2

    play(story, max_series=100, tokens=tokens)


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
