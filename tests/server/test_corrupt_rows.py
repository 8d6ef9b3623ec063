"""Acknowledged data can always be read; an unreadable row is lost to its own run only."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.test_fuzz import READS

from foreshock.contract.wire import AgentHealth, Array, Sample, Switched
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S5")


async def all_responses(service: Any, *runs: str) -> dict[str, Any]:
    """The responses of every route about these runs; none may fail."""
    found = {}
    for path in dict.fromkeys(path.format(run=run) for path in READS for run in runs):
        response = await service.client.get(path)
        assert response.status_code == 200, (path, response.text)
        found[path] = response.json() if "json" in response.headers["content-type"] else response.text
    return found


def array(values: Any, dtype: str) -> dict[str, Any]:
    return Array.of(np.array(values, dtype=dtype)).model_dump()


def sample_with(sample: Sample, **fields: Any) -> dict[str, Any]:
    return {**json.loads(sample.model_dump_json()), **fields}


def health(**fields: Any) -> dict[str, Any]:
    return {**AgentHealth(step=1).model_dump(mode="json"), **fields}


def switched(after: str, before: str = "plain") -> dict[str, Any]:
    heads = {"heads": [[0, 1]], "before": [before], "after": [after]}
    return {"kind": "switched", "id": "s", "step": 1, "outcome": "applied", "reason": "", **heads}


SIX = np.arange(6)
STARTED = json.loads(FakeRank().started().model_dump_json())
REFUSED: dict[str, Callable[[Sample], dict[str, Any]]] = {
    "risk with three numbers per head": lambda s: sample_with(s, risk=array(np.ones((6, 3)), "<f4")),
    "modes without numbers": lambda s: sample_with(s, modes=array(np.ones((6, 0)), "<i4")),
    "modes that are floats": lambda s: sample_with(s, modes=array(SIX, "<f8")),
    "norms of the wrong number of heads": lambda s: sample_with(s, query_norm=array([1.0, 2.0], "<f4")),
    "two-dimensional norms": lambda s: sample_with(s, key_norm=array(np.ones((6, 1)), "<f4")),
    "scalar norm": lambda s: sample_with(s, query_key_norm=array(1.0, "<f4")),
    "more heads than the boot has": lambda s: sample_with(
        s, states=None, modes=None, risk=array(np.ones(7), "<f4")
    ),
    "states with five slots": lambda s: sample_with(s, states=array(np.ones((6, 5)), "<i8")),
    "count beyond 64 bits": lambda s: health(dropped={"x": 10**400}),
    "negative fault count": lambda s: health(faults={"x": -1}),
    "time that is not a number": lambda s: sample_with(s, unix_seconds="NaN"),
    "mode name too long": lambda s: switched("m" * 65),
    "mode name with control characters": lambda s: switched("\x00\n"),
    "mitigation without a name": lambda s: {**STARTED, "mitigation": ""},
    "head number beyond 64 bits": lambda s: {**STARTED, "layers": [{**STARTED["layers"][0], "heads": [10**30]}]},
}  # fmt: skip


async def test_invalid_event_is_refused_with_reason_and_changes_no_run(service: Any) -> None:
    good, bad = FakeRank(run="good"), FakeRank(run="bad")
    for rank in (good, bad):
        await service.store(rank, rank.started(), rank.sample(1))
    before = await all_responses(service, "good", "bad")
    for name, invalid_event in REFUSED.items():
        batch = json.loads(bad.batch(bad.sample(2)).model_dump_json())
        batch["events"] = [invalid_event(bad.sample(2))]
        response = await service.client.post(
            "/v1/batches", content=json.dumps(batch), headers={"content-type": "application/json"}
        )
        assert response.status_code == 422, (name, response.text)
        problem = response.json()
        assert "too large to be stored" not in problem["detail"], name
        assert problem["errors"] or "heads" in problem["detail"], name
    after = await all_responses(service, "good", "bad")
    for path in ("/v1/runs/good", "/v1/runs/bad", "/v1/runs/bad/events"):
        assert after[path] == before[path]
    await service.store(bad, bad.sample(2))


TEXT = "x" * 300
DAMAGES = {
    "truncated blob": ("update samples set arrays = substr(arrays, 1, 40) where run_id = ? and step = 2", ()),
    "random blob": ("update samples set arrays = x'ff00ff00ff' where run_id = ?", ()),
    "risk with three numbers per head": (
        "update samples set arrays = ? where run_id = ?",
        (bytes([5, 2, 2]) + (6).to_bytes(4, "little") + (3).to_bytes(4, "little") + bytes(72),),
    ),
    "health counts beyond 64 bits": (
        "update boots set health = ? where run_id = ?",
        (json.dumps({"kind": "health", "step": 1, "dropped": {"x": 10**400}, "faults": {}}),),
    ),
    "negative counters": (
        "update boots set health = ? where run_id = ?",
        (json.dumps({"kind": "health", "step": 1, "dropped": {"queue_full": -5}, "faults": {"sender": -1}}),),
    ),
    "health is not JSON": ("update boots set health = '{' where run_id = ?", ()),
    "description is not JSON": ("update boots set description = '{' where run_id = ?", ()),
    "description with wrong types": (
        "update boots set description = ? where run_id = ?",
        (json.dumps({"policy": "yes", "mitigation": [], "labels": 3, "versions": None, "world_size": "x"}),),
    ),
    "invalid layers": ("update topologies set layers = '[{}]' where ? is not null", ()),
    "invalid warning": ("update warnings set verdict = '{}' where run_id = ?", ()),
    "event without payload": ("update events set payload = '{}' where run_id = ?", ()),
    "invalid answer": ("update command_ranks set switched = '{}' where ? is not null", ()),
    "unknown mode in an order": ("update commands set mode = ?, expect = '' where run_id = ?", (TEXT,)),
    "unknown mode in an event": ("update events set mode = ? where run_id = ?", (TEXT,)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "damage", [pytest.param(damage, marks=[pytest.mark.full] * (n % 3 > 0)) for n, damage in enumerate(DAMAGES)]
)
def test_corrupt_row_is_skipped_and_counted(run_scenario: Any, tmp_path: Path, damage: str) -> None:
    statement, values = DAMAGES[damage]
    good, bad = FakeRank(run="good"), FakeRank(run="bad")
    good.layers = tuple(layer.model_copy(update={"name": "other"}) for layer in good.layers)  # a separate topology
    second = FakeRank(run="bad", rank=1, boot="b2")
    expected: dict[str, Any] = {}

    async def before(service: Any) -> None:
        for rank in (good, bad, second):
            events = rank.started(), rank.sample(1), rank.sample(2), rank.verdict(2), AgentHealth(step=2)
            ack = await service.store(rank, *events)
        justified = {**switched("exact_delta"), "id": "s-1", "verdict": "warn-1", "heads": [[0, 2]]}
        await service.store(bad, Switched.model_validate(justified))
        ack = await service.store(second, second.sample(3))
        await service.store(second, second.answer(ack.commands[0], 3))
        order = {"who": "a", "reason": "b", "heads": [[0, 0]], "mode": "exact_delta"}
        assert (await service.client.post("/v1/runs/bad/commands", json=order)).status_code == 201
        expected.update(await all_responses(service, "good", "bad"))

    run_scenario(before)
    with sqlite3.connect(tmp_path / "foreshock.db") as database:
        bad_id = database.execute("select id from runs where name = 'bad'").fetchone()[0]
        if "topologies" in statement:
            digest = database.execute("select topology from boots where run_id = ?", [bad_id]).fetchone()[0]
            statement, values = "update topologies set layers = '[{}]' where hash = ?", ()
            bad_id = digest
        assert database.execute(statement, [*values, bad_id]).rowcount

    async def after(service: Any) -> None:
        found = await all_responses(service, "good", "bad")
        for path in (path.format(run="good") for path in READS if "{run}" in path):
            assert found[path] == expected[path]
        own = [line for line in expected["/metrics"].splitlines() if 'run="good"' in line]
        assert [line for line in found["/metrics"].splitlines() if 'run="good"' in line] == own
        assert [run["run"] for run in found["/v1/runs"]["runs"]] == [run["run"] for run in expected["/v1/runs"]["runs"]]
        for rank in (good, bad, second):  # all ranks can still send
            await service.store(rank, rank.sample(4))
        await all_responses(service, "good", "bad")
        if damage != "unknown mode in an event":
            assert unreadable(found["/metrics"]) > 0

    run_scenario(after)


def unreadable(exposition: str) -> float:
    """The number of unreadable rows that the service reports."""
    lines = [line for line in exposition.splitlines() if line.startswith("foreshock_service_unreadable_rows ")]
    return float(lines[0].split()[-1]) if lines else 0.0
