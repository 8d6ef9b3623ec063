"""What people and the page ask: names of any kind, wrong questions, the catalogue."""

from typing import Any

import pytest

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.server.testing import FakeRank


@pytest.mark.promise("S5")
@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/v1/runs/nobody/curves?line=run.loss", 404, "no run"),
        ("/v1/runs/run-1/curves?line=run.los", 422, "did you mean 'run.loss'? allowed are"),
        ("/v1/runs/run-1/matrix?metric=run.loss", 422, "allowed are"),
        ("/v1/runs/run-1/curves?line=run.loss&max_points=0", 422, "wrong"),
        ("/v1/runs/run-1/curves", 422, "wrong"),
        ("/v1/runs/run-1/curves?line=run.loss:0", 422, "METRIC"),
        ("/v1/runs/run-1/curves?line=head.score_max:0:1:2", 422, "METRIC"),
        ("/v1/runs/run-1/curves?line=head.score_max:-1", 422, "METRIC"),
        ("/v1/runs/nobody", 404, "no run"),
        ("/v1/commands/nothing", 404, "no command"),
        *(
            (f"/v1/runs?cursor=0x1.fffffffffffffp%2B{power}-1", 422, "wrong")
            for power in ("999", "1024", "\u0663\u0660")
        ),
    ],
)
async def test_wrong_questions_get_a_clear_sentence(service: Any, path: str, status: int, word: str) -> None:
    rank = FakeRank()
    await service.store(rank, rank.started(), rank.sample(1))
    answer = await service.client.get(path)
    assert answer.status_code == status
    assert word in answer.json()["detail"]
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_run_name_may_hold_slashes_dots_and_colons(service: Any) -> None:
    rank = FakeRank(run="team/../a:b.c/x")
    await service.store(rank, rank.started(), rank.sample(1))
    for tail in ("", "/curves", "/matrix", "/events", "/commands"):
        path = f"/v1/runs/team/%2E%2E/a:b.c/x{tail}"
        answer = await service.client.get(path, params={"metric": "head.score_max", "line": "head.score_max"})
        assert answer.status_code == 200, path


async def test_a_run_says_the_key_heads_and_head_dims_that_its_agent_knows_and_none_that_nothing_told(
    service: Any,
) -> None:
    rank = FakeRank()
    known, unknown = rank.layers
    rank.layers = (known, unknown.model_copy(update={"kv_heads_known": False, "head_dim": 0}))
    await service.store(rank, rank.started())
    layers = (await service.get("/v1/runs/run-1"))["layers"]
    assert [(layer["kv_heads"], layer["head_dim"]) for layer in layers] == [(3, 16), (None, None)]


async def test_the_catalogue_is_served_with_all_that_is_needed_to_draw(service: Any) -> None:
    served = {entry["key"]: entry for entry in (await service.get("/v1/catalog"))["metrics"]}
    assert set(served) == {metric.key for metric in BY_KEY.values() if metric.has_series}
    for key, entry in served.items():
        metric = BY_KEY[key]
        assert (entry["signed"], entry["scale"], entry["percent"]) == (metric.signed, metric.scale, metric.percent)
        assert (entry["levels"] is None) == (metric.levels is None)
    assert served["head.score_max"]["levels"] == {"alarm": 512.0, "watch": 100.0, "below": False}
    assert served["head.mode"]["chart"] is None
    first = [key for key, entry in served.items() if entry["chart"] == "first"]
    assert first[:2] == ["head.score_offset", "head.score_max"]
    assert first == sorted(first, key=lambda key: BY_KEY[key].chart or 0)
