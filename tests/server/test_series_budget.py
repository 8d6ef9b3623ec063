"""What is spent of the series budget, and on whom: alerts come first, and no token spends for the others."""

from typing import Any

import pytest
from tests.server.scraped import runs_of, shown

from foreshock.contract.wire import Finished
from foreshock.server.http.exposition import Table
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


@pytest.mark.promise("S15")
@pytest.mark.settings(max_series=480)
async def test_series_of_heads_are_made_only_as_far_as_the_budget_reaches(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    each = Table.__iter__

    def counted(self: Table) -> Any:
        made.append(self.labels[0][0])
        return each(self)

    for number in range(30):
        rank = FakeRank(run=f"run-{number:02}", layers=4, heads=range(6))
        await service.store(rank, rank.started(), rank.sample(1))
    monkeypatch.setattr(Table, "__iter__", counted)
    assert len(await shown(service)) <= 480 + 2
    assert made == ["run-00"]
    assert service.app.state.counters.series_dropped > 29 * 4 * 6  # what was left out is counted all the same
