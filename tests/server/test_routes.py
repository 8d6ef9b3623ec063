"""API routes: queries, descriptions of runs and deletion, on both databases."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from sqlalchemy import func, select

from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.wire import Finished
from foreshock.server.models import Acknowledgement, CommandRequest, Decision, Description, Undo
from foreshock.server.store.schema import metadata, runs
from foreshock.server.testing import FakeRank


async def store_run(service: Any, run: str, ended: bool = False) -> FakeRank:
    """Store a run with two samples and a warning, and optionally its end."""
    rank = FakeRank(run=run)
    events = [rank.started(), rank.sample(1), rank.sample(2), rank.verdict(2)]
    if ended:
        events.append(Finished(step=2, unix_seconds=2.0, status="completed"))
    await service.store(rank, *events)
    return rank


async def row_counts(service: Any) -> dict[str, int]:
    """The number of rows in each table with data of runs."""
    found = {}
    with service.app.state.store.reader.engine.begin() as connection:
        for table in metadata.sorted_tables:
            if table is runs or "run_id" in table.c or "boot_id" in table.c:
                query = select(func.count()).select_from(table)
                found[table.name] = connection.execute(query).scalar_one()
    return found


@pytest.mark.full
@pytest.mark.usefixtures("both_databases")
async def test_run_description_is_stored_searchable_and_audited(service: Any) -> None:
    rank = await store_run(service, "sweep/lr-6e-4/seed-11")
    await store_run(service, "sweep/lr-3e-4/seed-12")
    listed = await service.get("/v1/runs")  # fills the cache, which a new description must invalidate
    assert {run["display_name"] for run in listed["runs"]} == {None}
    description = {"display_name": "Große Hoffnung", "tags": ["keep", "baseline", "keep"], "notes": "two lines\nof it"}
    response = await service.client.patch("/v1/runs/sweep/lr-6e-4/seed-11", json={"who": "Ada", **description})
    assert response.status_code == 200, response.text
    assert response.json()["notes"] == "two lines\nof it"

    [named] = [run for run in (await service.get("/v1/runs"))["runs"] if run["display_name"]]
    assert (named["run"], named["tags"]) == ("sweep/lr-6e-4/seed-11", ["baseline", "keep"])
    for search in ("Hoffnung", "baseline", "lr-6e"):
        found = await service.get("/v1/runs", search=search)
        assert [run["run"] for run in found["runs"]] == ["sweep/lr-6e-4/seed-11"], search

    response = await service.client.patch(
        "/v1/runs/sweep/lr-6e-4/seed-11", json={"who": "Grace", "tags": [], "display_name": ""}
    )
    assert (response.json()["tags"], response.json()["display_name"]) == ([], None)
    assert response.json()["notes"] == "two lines\nof it", "omitted fields must not change"
    events = (await service.get(f"/v1/runs/{rank.run}/events", kind="described"))["events"]
    assert [event["sentence"] for event in events] == [
        "Grace (local) changed the run's display name and tags.",
        "Ada (local) changed the run's display name and tags and notes.",
    ]
    trail = await service.get("/v1/audit")
    assert [(row["actor"], row["action"], row["run"]) for row in trail["rows"]] == [
        ("Grace (local)", "described", rank.run),
        ("Ada (local)", "described", rank.run),
    ]
    assert trail["rows"][1]["details"] == {**description, "tags": ["baseline", "keep"]}
    await service.client.patch(f"/v1/runs/{rank.run}", json={"who": "Grace", "tags": []})
    assert len((await service.get("/v1/audit"))["rows"]) == 2, "a request without a change must not be audited"
    await service.store(rank, rank.sample(3))  # the run still receives samples under its name
    assert (await service.get(f"/v1/runs/{rank.run}"))["last_step"] == 3


@pytest.mark.promise("S20")
async def test_invalid_run_description_is_refused_with_reason(service: Any) -> None:
    await store_run(service, "plain")
    tags = [f"t{i}" for i in range(33)]
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tags": ["a=b"]}, "Contains a comma or an equals sign, which a tag must not: NAME=VALUE is a label"),
        ({"tags": ["a,b"]}, "Contains a comma or an equals sign"),
        ({"tags": [""]}, "Has 0 characters; no fewer than 1 are allowed"),
        ({"tags": ["x" * 65]}, "Has 65 characters; at most 64 are allowed"),
        ({"tags": [" blank"]}, ""),
        ({"tags": tags}, "List should have at most 32 items after validation, not 33"),
        ({"display_name": "two\nlines"}, ""),
        ({"display_name": "x" * 129}, "Has 129 characters; at most 128 are allowed"),
        ({"notes": "a\x00b"}, "NUL"),
        ({"notes": "x" * 4001}, "Has 4001 characters"),
        ({"name": "other"}, "Extra inputs"),
    )
    for description, message in refused:
        response = await service.client.patch("/v1/runs/plain", json={"who": "Ada", **description})
        assert response.status_code == 422, description
        [error] = response.json()["errors"]
        assert message in error["message"] != "", error
    assert (await service.get("/v1/audit"))["rows"] == []


@pytest.mark.usefixtures("both_databases")
async def test_deleted_run_leaves_no_rows_and_its_reused_id_is_not_confused(
    service: Any,
) -> None:
    await store_run(service, "stays")
    remaining = await row_counts(service)
    await store_run(service, "a/deleted", ended=True)
    order = {"who": "Ada", "reason": "a typing error", "mode": "exact_delta", "dry_run": True}
    for run in ("stays", "a/deleted"):
        await service.client.post(f"/v1/runs/{run}/commands", json=order)
    remaining |= {"commands": 1, "events": remaining["events"] + 1}
    assert (await row_counts(service))["samples"] == 4
    for path in ("/v1/runs", "/metrics"):  # fills the caches
        assert "a/deleted" in (await service.client.get(path)).text
    deleted = await service.client.delete("/v1/runs/a/deleted", params={"who": "Ada", "reason": "a typing error"})
    assert deleted.status_code == 204, deleted.text
    assert await row_counts(service) == remaining
    assert [run["run"] for run in (await service.get("/v1/runs"))["runs"]] == ["stays"]
    assert (await service.client.get("/v1/runs/a/deleted")).status_code == 404
    rows = (await service.get("/v1/audit"))["rows"]
    assert [(row["action"], row["run"], row["details"]) for row in rows[:2]] == [
        ("deleted", "a/deleted", {"reason": "a typing error"}),
        ("deletion begun", "a/deleted", {"reason": "a typing error"}),
    ]
    repeated = await service.client.delete("/v1/runs/a/deleted", params={"who": "Ada", "reason": "once more"})
    assert repeated.status_code == 404
    await store_run(service, "next", ended=True)  # SQLite reuses the id of the deleted run
    assert [run["run"] for run in (await service.get("/v1/runs"))["runs"]] == ["next", "stays"]
    assert 'run="a/deleted"' not in (shown := (await service.client.get("/metrics")).text)
    assert 'run="next"' in shown


@pytest.mark.usefixtures("both_databases")
async def test_training_run_cannot_be_deleted_but_silent_run_can(service: Any) -> None:
    rank = await store_run(service, "trains")
    order = {"who": "Ada", "reason": "by mistake"}
    refused = await service.client.delete("/v1/runs/trains", params=order)
    assert refused.status_code == 409
    assert "still trains" in refused.json()["detail"]
    assert (await service.get("/v1/audit"))["rows"] == []
    with service.app.state.store.writer.engine.begin() as connection:
        connection.execute(runs.update().values(last_seen=runs.c.last_seen - 301))
    assert (await service.client.delete("/v1/runs/trains", params=order)).status_code == 204
    await service.store(rank, rank.sample(9))  # the training still ran, so the run reappears with new samples
    assert (await service.get("/v1/runs/trains"))["last_step"] == 9


BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CommandRequest, {"who": "ann", "reason": "it drifts", "mode": "row_corrected"}),
    (Decision, {"who": "ann", "reason": "it drifts"}),
    (Acknowledgement, {"who": "ann", "reason": "it drifts", "incident": "rounding"}),
    (Undo, {"who": "ann", "reason": "it drifts"}),
    (Description, {"who": "ann", "notes": "seed 3"}),
]


@pytest.mark.parametrize(("model", "body"), BODIES)
@pytest.mark.parametrize("blank", ["", " ", "\t \n", "\u00a0\u2003"])
def test_actions_require_a_name_and_a_reason(model: type[BaseModel], body: dict[str, Any], blank: str) -> None:
    assert model.model_validate(body)
    for field in {"who", "reason"} & body.keys():
        with pytest.raises(ValidationError):
            model.model_validate(body | {field: blank})


@pytest.mark.promise("S5")
@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/v1/runs/nobody/curves?line=run.loss", 404, "no run"),
        ("/v1/runs/run-1/curves?line=run.los", 422, "did you mean 'run.loss'? allowed are"),
        ("/v1/runs/run-1/matrix?metric=run.loss", 422, "allowed are"),
        ("/v1/runs/run-1/curves?line=run.loss&max_points=0", 422, "wrong"),
        ("/v1/runs/run-1/curves", 422, "wrong"),
        ("/v1/runs/run-1/curves?line=run.loss:0", 422, "leave out the layer"),
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
async def test_invalid_query_gets_clear_error(service: Any, rank: FakeRank, path: str, status: int, word: str) -> None:
    await service.store(rank, rank.started(), rank.sample(1))
    response = await service.client.get(path)
    assert response.status_code == status
    assert word in response.json()["detail"]
    assert response.headers["content-type"] == "application/problem+json"


async def test_run_name_may_contain_slashes_dots_and_colons(service: Any) -> None:
    rank = FakeRank(run="team/.v1/a:b.c/x")
    await service.store(rank, rank.started(), rank.sample(1))
    for tail in ("", "/curves", "/matrix", "/events", "/commands"):
        path = f"/v1/runs/team/%2Ev1/a:b.c/x{tail}"
        response = await service.client.get(path, params={"metric": "head.score_max", "line": "head.score_max"})
        assert response.status_code == 200, path


async def test_run_shows_kv_heads_and_head_dims_only_if_known(
    service: Any,
    rank: FakeRank,
) -> None:
    known, unknown = rank.layers
    rank.layers = (known, unknown.model_copy(update={"kv_heads_known": False, "head_dim": 0}))
    await service.store(rank, rank.started())
    layers = (await service.get("/v1/runs/run-1"))["layers"]
    assert [(layer["kv_heads"], layer["head_dim"]) for layer in layers] == [(3, 16), (None, None)]


async def test_catalogue_gives_scales_levels_and_chart_order_of_every_metric(service: Any) -> None:
    catalogue = {entry["key"]: entry for entry in (await service.get("/v1/catalog"))["metrics"]}
    assert set(catalogue) == {metric.key for metric in BY_KEY.values() if metric.has_series}
    for key, entry in catalogue.items():
        metric = BY_KEY[key]
        assert (entry["signed"], entry["scale"], entry["percent"]) == (metric.signed, metric.scale, metric.percent)
        assert (entry["levels"] is None) == (metric.levels is None)
    assert catalogue["head.score_max"]["levels"] == {"alarm": 512.0, "watch": 100.0, "below": False}
    assert catalogue["head.mode"]["chart"] is None
    first = [key for key, entry in catalogue.items() if entry["chart"] == "first"]
    assert first[:2] == ["head.score_offset", "head.score_max"]
    assert first == sorted(first, key=lambda key: BY_KEY[key].chart or 0)
