"""Upgrades lose nothing: batches of newer agents, stores of older builds, and recorded batches of released versions.

A new wire version adds golden files; existing ones never change.
"""

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError
from tests.server import golden_store

from foreshock.contract import wire
from foreshock.contract.wire import WIRE_VERSION, Batch, Event, Unknown
from foreshock.server.readings import BUCKET, unreadable
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S16")
JSON = {"content-type": "application/json"}


async def get_json(service: Any, address: str) -> Any:
    """The JSON at a path with its query."""
    response = await service.client.get(address)
    assert response.status_code == 200, (address, response.text)
    return response.json()


# ---- batches of a newer agent ---------------------------------------------------------------------------------------


def newest_batch() -> dict[str, Any]:
    """A batch that a newer agent may send, with unknown slots, fields, event kinds and modes."""
    rank = FakeRank()
    switched = rank.answer(wire.Command(id="c", mode="row_corrected", reason="", issued_by="ann"), 3)
    batch: dict[str, Any] = json.loads(
        rank.batch(rank.started(), rank.sample(1), rank.verdict(2), switched).model_dump_json()
    )  # fmt: skip
    batch["tide"] = "high"
    started, sample, _, _ = batch["events"]
    started |= {"scope": "layer", "mitigation": "row_corrected"}
    started["layers"][0]["colour"] = [1, 2]
    words = wire.Array.model_validate(sample["states"]).numpy()
    sample["states"] = wire.Array.of(np.concatenate([words, words[:, :3]], axis=1)).model_dump()
    sample["moon"] = {"phase": 1}
    batch["events"].append({"kind": "eclipse", "step": 3})
    return batch


async def test_batch_of_newer_agent_is_stored_with_unknown_slots(service: Any, tmp_path: Path) -> None:
    batch = newest_batch()

    response = await service.client.post("/v1/batches", content=json.dumps(batch), headers=JSON)
    assert response.status_code == 200, response.text
    found = await service.get("/v1/runs/run-1")
    assert found["mitigation"] == "row_corrected"
    own = await service.get("/v1/runs/run-1/matrix", metric="head.score_max")
    assert own["values"][0][0] == FakeRank().words(1).view(np.float64)[0, 6]

    with sqlite3.connect(tmp_path / "foreshock.db") as database:
        [(blob,)] = database.execute("select arrays from samples").fetchall()
    sent = wire.Array.model_validate(batch["events"][1]["states"]).numpy()
    assert sent.tobytes() in blob


# ---- store of an older build ----------------------------------------------------------------------------------------


def assert_contains(new: Any, old: Any, at: str, within: float = 0.0) -> None:
    """Assert that the new response contains everything from the old one; it may contain more."""
    if isinstance(old, dict):
        for key, value in old.items():
            assert key in new, f"{at}.{key}"
            assert_contains(new[key], value, f"{at}.{key}", within)
    elif isinstance(old, list):
        assert len(new) == len(old), at
        for i, (one, other) in enumerate(zip(new, old, strict=True)):
            assert_contains(one, other, f"{at}.{i}", within)
    else:
        assert new == old or (within and new == pytest.approx(old, rel=within)), at


def of_worst_heads(curves: Any) -> Any:
    """Curves with worst heads reduced to the largest value per point, because older builds had one head per point."""
    for line in curves["lines"]:
        if line["worst_head"] is not None:
            ends = zip(line.pop("low"), line["high"], strict=True)
            line["high"] = [None if high is None else max(-low, high) for low, high in ends]
            del line["last"]
    return curves


@pytest.fixture
def old_store(tmp_path: Path) -> None:
    """The store of an older build, before the service opens it."""
    golden_store.store_at(tmp_path / "foreshock.db")
    unreadable.clear()  # entries of earlier tests in this process
    with sqlite3.connect(tmp_path / "foreshock.db") as database:  # as if the older build had just stopped
        # Move all times equally, because the list is sorted by them.
        database.execute("update runs set last_seen = last_seen + ? - (select max(last_seen) from runs)", [time.time()])
        database.execute("update boots set stepped = ? where stepped is not null", [time.time()])
        database.execute("update commands set expires = ? where expires is not null", [time.time() + 3600])


@pytest.mark.usefixtures("old_store")
@pytest.mark.settings(verify_steps=0, finished_run_seconds=1e6, silent_run_seconds=1e6)
async def test_old_store_is_migrated_and_reads_as_before(service: Any) -> None:
    expected_responses = golden_store.responses()
    for path, expected in expected_responses.items():
        if path == "/metrics":
            continue
        now = await get_json(service, path)
        if path == "/v1/catalog":
            known = {metric["key"]: metric for metric in now["metrics"]}
            assert {metric["key"] for metric in expected["metrics"]} <= known.keys()
            continue
        if path.startswith("/v1/audit"):  # older builds chained the rows by hashes
            chained = {"hash", "previous_hash"}
            expected = {"rows": [{k: row[k] for k in row.keys() - chained} for row in expected["rows"]]}
        if "/curves" in path:
            now, expected = of_worst_heads(now), of_worst_heads(expected)
        if expected.get("measured_step") is not None:  # the step of the sample, or of its bucket in a roll-up
            assert 0 <= expected.pop("measured_step") - now["measured_step"] < BUCKET
        within = 1e-6 if "/curves" in path else 0.0  # roll-ups have single precision
        assert_contains(without_wording(without_times(now)), without_wording(without_times(expected)), path, within)
    metrics = (await service.client.get("/metrics")).text
    missing = series_of(expected_responses["/metrics"]) - series_of(metrics)
    assert all("stable_softmax" in line for line in missing)  # a removed mode, now counted as `other`
    assert "foreshock_service_unreadable_rows 0.0" in metrics
    warned = 0  # runs recorded before incidents existed have them, too
    for row in (await service.get("/v1/runs", limit=500))["runs"]:
        found = (await service.get(f"/v1/runs/{row['run']}/incidents"))["incidents"]
        heads = {(w["layer"], w["head"]) for w in (await service.get(f"/v1/runs/{row['run']}"))["warnings"]}
        shown = {(h["layer"], h["head"]) for i in found for h in i["heads"] if h["state"] != "quiet"}
        assert shown == heads, row["run"]
        warned += bool(heads)
    assert warned
    # The run continues in the migrated store. Its open order is for a removed mode.
    first = FakeRank(run="golden/ranks", rank=0, boot="b0")
    first.sequence = 1000
    assert not (await service.store(first, first.sample(1500, 1400))).commands
    assert (await service.get("/v1/runs/golden/ranks/matrix", metric="head.mode"))["step"] == 1500


_CLOCKS = {"first_seen_unix_seconds", "last_seen_unix_seconds", "last_step_unix_seconds", "expires_unix_seconds"}


def without_times(value: Any) -> Any:
    """A response without the times that the test or the clock changes."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in _CLOCKS}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def without_wording(value: Any, *, incident: bool = False) -> Any:
    """A response with only the presence of incident sentences, whose words differ between versions, and without the
    latest step of forecasts, which newer versions do not fill."""
    if isinstance(value, dict):
        return {
            key: bool(inner) if incident and key == "sentence" else without_wording(inner, incident=key == "incidents")
            for key, inner in value.items()
            if key not in ("forecast_high_steps", "harm_last_step")
        }
    return [without_wording(inner, incident=incident) for inner in value] if isinstance(value, list) else value


def series_of(exposition: str) -> set[str]:
    """All series of runs with their values, without times and without the sentences of incidents."""
    lines = (
        re.sub(r'\b(done|sentence|to_do)="[^"]+"', r"\1", line) for line in exposition.splitlines() if 'run="' in line
    )
    return {line for line in lines if not line.startswith(("foreshock_run_last_", "foreshock_run_silent"))}


@pytest.mark.parametrize("scope", ["head", "model", "of_tomorrow", None])
async def test_run_shows_switch_scope_reported_by_agent(service: Any, rank: FakeRank, scope: str | None) -> None:
    await service.store(rank, rank.started().model_copy(update={"switch_scope": scope}))
    assert (await service.get("/v1/runs/run-1"))["switch_scope"] == scope

    with pytest.raises(ValidationError):
        wire.Started.model_validate({**FakeRank().started().model_dump(), "switch_scope": "a head!"})


GOLDEN = Path(__file__).parent / "golden"
VERSIONS = range(1, WIRE_VERSION + 1)
_WHEN = {"first_seen_unix_seconds", "last_seen_unix_seconds", "unix_seconds", "id"}
_SKIPPED = {"revision", "loss_max", "retries", "spool_bytes", "oldest_unsent_seconds"}
"""Fields that agents sent but the service never read."""


def golden_lines(version: int) -> list[str]:
    return (GOLDEN / f"wire_{version}.jsonl").read_text("utf-8").splitlines()


def without(names: set[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without(names, inner) for key, inner in value.items() if key not in names}
    return [without(names, inner) for inner in value] if isinstance(value, list) else value


def without_clock(value: Any) -> Any:
    """A response without values that depend on the clock or on the order of arrival."""
    return without(_WHEN, value)


async def state_of(service: Any) -> Any:
    """All responses about the golden run."""
    run = "/v1/runs/golden/run-1"
    state: dict[str, Any] = {"run": without_clock(await service.get(run))}
    for metric in ("run.loss", "run.grad_norm", "run.worst_risk"):
        state[metric] = (await service.get(f"{run}/curves", line=metric))["lines"]
    for metric in ("head.score_offset", "head.query_norm", "head.mode"):
        state[metric] = without_clock(await service.get(f"{run}/matrix", metric=metric))
    kinds = ["started", "verdict", "switched", "command", "finished"]  # the order of incident events depends on arrival
    found = without_clock(await service.get(f"{run}/events", kind=kinds))["events"]
    state["events"] = sorted(found, key=json.dumps)
    return state


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
async def test_batches_of_released_version_give_the_same_state(service: Any, version: int, order: int) -> None:
    for line in golden_lines(version)[::order]:
        headers = {"content-type": "application/json"}
        response = await service.client.post("/v1/batches", content=line, headers=headers)
        assert response.status_code == 200, response.text
    expected = json.loads((GOLDEN / f"wire_{version}_state.json").read_text("utf-8"))
    assert_contains(await state_of(service), expected, "state")


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_batch_round_trips_unchanged(version: int) -> None:
    for line in golden_lines(version):
        written = Batch.model_validate_json(line).model_dump_json(exclude_unset=True)
        assert json.loads(written) == without(_SKIPPED, json.loads(line))


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_batches_cover_every_event_kind_with_known_fields(version: int) -> None:
    sent: dict[str, set[str]] = {}
    for line in golden_lines(version):
        for event in json.loads(line)["events"]:
            sent.setdefault(event["kind"], set()).update(key for key, value in event.items() if value is not None)
    known = [kind for kind in get_args(get_args(Event)[0]) if kind is not Unknown]
    kinds = {kind.model_fields["kind"].default: set(kind.model_fields) for kind in known}
    assert set(sent) == set(kinds)
    assert all(sent[kind] - _SKIPPED <= fields for kind, fields in kinds.items())
