"""An agent of a build to come, this service, a store that another build left, and batches of every released version as
they were on the wire: nothing is lost. A new version adds golden files; the old ones never change."""

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError
from tests.server import golden_store as old

from foreshock.contract import wire
from foreshock.contract.wire import WIRE_VERSION, Batch, Event, Unknown
from foreshock.server.readings import BUCKET, unreadable
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S16")
JSON = {"content-type": "application/json"}


async def answer_at(service: Any, address: str) -> Any:
    """The JSON at an address with its query."""
    answer = await service.client.get(address)
    assert answer.status_code == 200, (address, answer.text)
    return answer.json()


# ---- a newer agent, this service ------------------------------------------------------------------------------------


def newest_batch() -> dict[str, Any]:
    """What an agent of a version to come may send: more slots, fields, kinds and modes."""
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
    said = newest_batch()

    answer = await service.client.post("/v1/batches", content=json.dumps(said), headers=JSON)
    assert answer.status_code == 200, answer.text
    found = await service.get("/v1/runs/run-1")
    assert found["mitigation"] == "row_corrected"
    own = await service.get("/v1/runs/run-1/matrix", metric="head.score_max")
    assert own["values"][0][0] == FakeRank().words(1).view(np.float64)[0, 6]

    with sqlite3.connect(tmp_path / "foreshock.db") as database:
        [(blob,)] = database.execute("select arrays from samples").fetchall()
    sent = wire.Array.model_validate(said["events"][1]["states"]).numpy()
    assert sent.tobytes() in blob


# ---- an old store ---------------------------------------------------------------------------------------------------


def assert_holds(now: Any, was: Any, at: str, within: float = 0.0) -> None:
    """All that was answered is answered still; more may be."""
    if isinstance(was, dict):
        for key, value in was.items():
            assert key in now, f"{at}.{key}"
            assert_holds(now[key], value, f"{at}.{key}", within)
    elif isinstance(was, list):
        assert len(now) == len(was), at
        for i, (one, other) in enumerate(zip(now, was, strict=True)):
            assert_holds(one, other, f"{at}.{i}", within)
    else:
        assert now == was or (within and now == pytest.approx(was, rel=within)), at


def of_worst_heads(curves: Any) -> Any:
    """Curves; of worst heads the largest value of each point and whose it is: they were found once a point then."""
    for line in curves["lines"]:
        if line["worst_head"] is not None:
            ends = zip(line.pop("low"), line["high"], strict=True)
            line["high"] = [None if high is None else max(-low, high) for low, high in ends]
            del line["last"]
    return curves


@pytest.fixture
def old_store(tmp_path: Path) -> None:
    """The store of another build, before the service opens it."""
    old.store_at(tmp_path / "foreshock.db")
    unreadable.clear()  # what tests before this one left in this process
    with sqlite3.connect(tmp_path / "foreshock.db") as database:  # as if it had been left a minute ago
        # All moved by as much: which run was heard of last is the order of the list.
        database.execute("update runs set last_seen = last_seen + ? - (select max(last_seen) from runs)", [time.time()])
        database.execute("update boots set stepped = ? where stepped is not null", [time.time()])
        database.execute("update commands set expires = ? where expires is not null", [time.time() + 3600])


@pytest.mark.usefixtures("old_store")
@pytest.mark.settings(verify_steps=0, finished_run_seconds=1e6, silent_run_seconds=1e6)
async def test_old_store_is_migrated_and_reads_as_before(service: Any) -> None:
    was = old.answers()
    for path, answered in was.items():
        if path == "/metrics":
            continue
        now = await answer_at(service, path)
        if path == "/v1/catalog":
            known = {metric["key"]: metric for metric in now["metrics"]}
            assert {metric["key"] for metric in answered["metrics"]} <= known.keys()
            continue
        if path.startswith("/v1/audit"):  # its rows were chained by hashes then
            chained = {"hash", "previous_hash"}
            answered = {"rows": [{k: row[k] for k in row.keys() - chained} for row in answered["rows"]]}
        if "/curves" in path:
            now, answered = of_worst_heads(now), of_worst_heads(answered)
        if answered.get("measured_step") is not None:  # of the sample, or of the roll-up's bucket that holds it
            assert 0 <= answered.pop("measured_step") - now["measured_step"] < BUCKET
        within = 1e-6 if "/curves" in path else 0.0  # roll-ups, which are built again meanwhile, have single precision
        assert_holds(reworded(timeless(now)), reworded(timeless(answered)), path, within)
    metrics = (await service.client.get("/metrics")).text
    missing = series_of(was["/metrics"]) - series_of(metrics)
    assert all("stable_softmax" in line for line in missing)  # a mode that went: counted as another one
    assert "foreshock_service_unreadable_rows 0.0" in metrics
    warned = 0  # runs recorded before there were incidents have them all the same
    for row in (await service.get("/v1/runs", limit=500))["runs"]:
        found = (await service.get(f"/v1/runs/{row['run']}/incidents"))["incidents"]
        heads = {(w["layer"], w["head"]) for w in (await service.get(f"/v1/runs/{row['run']}"))["warnings"]}
        shown = {(h["layer"], h["head"]) for i in found for h in i["heads"] if h["state"] != "quiet"}
        assert shown == heads, row["run"]
        warned += bool(heads)
    assert warned
    # ... and it is written on: the run goes on where it stood. Its open order is for a mode that went since.
    first = FakeRank(run="golden/ranks", rank=0, boot="b0")
    first.sequence = 1000
    assert not (await service.store(first, first.sample(1500, 1400))).commands
    assert (await service.get("/v1/runs/golden/ranks/matrix", metric="head.mode"))["step"] == 1500


_CLOCKS = {"first_seen_unix_seconds", "last_seen_unix_seconds", "last_step_unix_seconds", "expires_unix_seconds"}


def timeless(value: Any) -> Any:
    """An answer without what the test moved or the clock moves."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in _CLOCKS}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def reworded(value: Any, *, incident: bool = False) -> Any:
    """An answer in which an incident's sentence only is there, since each version makes it from what is stored, without
    the latest step of a forecast, which no version since filled."""
    if isinstance(value, dict):
        return {
            key: bool(inner) if incident and key == "sentence" else reworded(inner, incident=key == "incidents")
            for key, inner in value.items()
            if key not in ("forecast_high_steps", "harm_last_step")
        }
    return [reworded(inner, incident=incident) for inner in value] if isinstance(value, list) else value


def series_of(exposition: str) -> set[str]:
    """Every series about runs with its value, without those that tell the time, and without an incident's sentences."""
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
"""Fields that agents sent and nothing read."""


def golden_lines(version: int) -> list[str]:
    return (GOLDEN / f"wire_{version}.jsonl").read_text("utf-8").splitlines()


def without(names: set[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without(names, inner) for key, inner in value.items() if key not in names}
    return [without(names, inner) for inner in value] if isinstance(value, list) else value


def without_clock(value: Any) -> Any:
    """An answer without what depends on the clock or on the order of arrival."""
    return without(_WHEN, value)


async def state_of(service: Any) -> Any:
    """Everything that a reader can ask of the golden run."""
    run = "/v1/runs/golden/run-1"
    state: dict[str, Any] = {"run": without_clock(await service.get(run))}
    for metric in ("run.loss", "run.grad_norm", "run.worst_risk"):
        state[metric] = (await service.get(f"{run}/curves", line=metric))["lines"]
    for metric in ("head.score_offset", "head.query_norm", "head.mode"):
        state[metric] = without_clock(await service.get(f"{run}/matrix", metric=metric))
    kinds = ["started", "verdict", "switched", "command", "finished"]  # incidents open and close in another order
    found = without_clock(await service.get(f"{run}/events", kind=kinds))["events"]
    state["events"] = sorted(found, key=json.dumps)
    return state


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
async def test_batches_of_released_version_give_the_same_state(service: Any, version: int, order: int) -> None:
    for line in golden_lines(version)[::order]:
        headers = {"content-type": "application/json"}
        answer = await service.client.post("/v1/batches", content=line, headers=headers)
        assert answer.status_code == 200, answer.text
    meant = json.loads((GOLDEN / f"wire_{version}_state.json").read_text("utf-8"))
    assert_holds(await state_of(service), meant, "state")


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_batch_round_trips_unchanged(version: int) -> None:
    for line in golden_lines(version):
        written = Batch.model_validate_json(line).model_dump_json(exclude_unset=True)
        assert json.loads(written) == without(_SKIPPED, json.loads(line))


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_batches_cover_every_event_kind_with_known_fields(version: int) -> None:
    said: dict[str, set[str]] = {}
    for line in golden_lines(version):
        for event in json.loads(line)["events"]:
            said.setdefault(event["kind"], set()).update(key for key, value in event.items() if value is not None)
    known = [kind for kind in get_args(get_args(Event)[0]) if kind is not Unknown]
    kinds = {kind.model_fields["kind"].default: set(kind.model_fields) for kind in known}
    assert set(said) == set(kinds)
    assert all(said[kind] - _SKIPPED <= fields for kind, fields in kinds.items())
