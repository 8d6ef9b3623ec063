"""The list of runs, page by page."""

from typing import Any

import pytest

from foreshock.server.testing import FakeRank


async def test_runs_are_listed_page_by_page(service: Any) -> None:
    for number in range(5):
        rank = FakeRank(run=f"run-{number}")
        await service.store(rank, rank.started(), rank.sample(1))
    seen: list[str] = []
    cursor = None
    while True:
        page = await service.get("/v1/runs", limit=2, **({"cursor": cursor} if cursor else {}))
        seen += [run["run"] for run in page["runs"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert seen == [f"run-{number}" for number in (4, 3, 2, 1, 0)]


@pytest.mark.promise("S5")
async def test_a_cursor_that_the_service_never_gave_is_refused(service: Any) -> None:
    for power in ("999", "1024", "\N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT ZERO}"):
        for last in ("1", "9999999999999999999", "\N{ARABIC-INDIC DIGIT THREE}"):
            answer = await service.client.get("/v1/runs", params={"cursor": f"0x1.fffffffffffffp+{power}-{last}"})
            assert answer.status_code == 422, (power, last)


async def test_a_run_says_the_key_heads_and_head_dims_that_its_agent_knows_and_none_that_nothing_told(
    service: Any,
) -> None:
    rank = FakeRank()
    known, unknown = rank.layers
    rank.layers = (known, unknown.model_copy(update={"kv_heads_known": False, "head_dim": 0}))
    await service.store(rank, rank.started())
    layers = (await service.get("/v1/runs/run-1"))["layers"]
    assert [(layer["kv_heads"], layer["head_dim"]) for layer in layers] == [(3, 16), (None, None)]
