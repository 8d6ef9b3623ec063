"""Whatever is acknowledged can be read; a row that cannot be read costs its own run that row, and nobody else any."""

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


async def every_answer(service: Any, *runs: str) -> dict[str, Any]:
    """What every address answers about these runs; none may fail."""
    found = {}
    for path in dict.fromkeys(path.format(run=run) for path in READS for run in runs):
        answer = await service.client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        found[path] = answer.json() if "json" in answer.headers["content-type"] else answer.text
    return found


def array(values: Any, dtype: str) -> dict[str, Any]:
    return Array.of(np.array(values, dtype=dtype)).model_dump()


def changed(sample: Sample, **fields: Any) -> dict[str, Any]:
    return {**json.loads(sample.model_dump_json()), **fields}


def health(**fields: Any) -> dict[str, Any]:
    return {**AgentHealth(step=1).model_dump(mode="json"), **fields}


def switched(after: str, before: str = "plain") -> dict[str, Any]:
    heads = {"heads": [[0, 1]], "before": [before], "after": [after]}
    return {"kind": "switched", "id": "s", "step": 1, "outcome": "applied", "reason": "", **heads}


SIX = np.arange(6)
STARTED = json.loads(FakeRank().started().model_dump_json())
REFUSED: dict[str, Callable[[Sample], dict[str, Any]]] = {
    "risk of three numbers a head": lambda s: changed(s, risk=array(np.ones((6, 3)), "<f4")),
    "modes of no number a head": lambda s: changed(s, modes=array(np.ones((6, 0)), "<i4")),
    "modes that are floats": lambda s: changed(s, modes=array(SIX, "<f8")),
    "norms of another number of heads": lambda s: changed(s, query_norm=array([1.0, 2.0], "<f4")),
    "norms in a table": lambda s: changed(s, key_norm=array(np.ones((6, 1)), "<f4")),
    "a norm without a shape": lambda s: changed(s, query_key_norm=array(1.0, "<f4")),
    "more heads than the boot watches": lambda s: changed(
        s, states=None, modes=None, risk=array(np.ones(7), "<f4")
    ),
    "states of five slots": lambda s: changed(s, states=array(np.ones((6, 5)), "<i8")),
    "a count past every type": lambda s: health(dropped={"x": 10**400}),
    "a fault less than none": lambda s: health(faults={"x": -1}),
    "a clock that is no number": lambda s: changed(s, unix_seconds="NaN"),
    "a mode's name without end": lambda s: switched("m" * 65),
    "a mode's name of control characters": lambda s: switched("\x00\n"),
    "a mitigation without a name": lambda s: {**STARTED, "mitigation": ""},
    "a head number past every model": lambda s: {**STARTED, "layers": [{**STARTED["layers"][0], "heads": [10**30]}]},
}  # fmt: skip


async def test_invalid_event_is_refused_with_reason_and_changes_no_run(service: Any) -> None:
    good, bad = FakeRank(run="good"), FakeRank(run="bad")
    for rank in (good, bad):
        await service.store(rank, rank.started(), rank.sample(1))
    before = await every_answer(service, "good", "bad")
    for what, poison in REFUSED.items():
        batch = json.loads(bad.batch(bad.sample(2)).model_dump_json())
        batch["events"] = [poison(bad.sample(2))]
        answer = await service.client.post(
            "/v1/batches", content=json.dumps(batch), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422, (what, answer.text)
        said = answer.json()
        assert "too large to be stored" not in said["detail"], what
        assert said["errors"] or "heads" in said["detail"], what
    after = await every_answer(service, "good", "bad")
    for path in ("/v1/runs/good", "/v1/runs/bad", "/v1/runs/bad/events"):
        assert after[path] == before[path]
    await service.store(bad, bad.sample(2))


TEXT = "x" * 300
WOUNDS = {
    "a torn blob": ("update samples set arrays = substr(arrays, 1, 40) where run_id = ? and step = 2", ()),
    "a blob of nonsense": ("update samples set arrays = x'ff00ff00ff' where run_id = ?", ()),
    "risk of three numbers a head": (
        "update samples set arrays = ? where run_id = ?",
        (bytes([5, 2, 2]) + (6).to_bytes(4, "little") + (3).to_bytes(4, "little") + bytes(72),),
    ),
    "health of numbers past every type": (
        "update boots set health = ? where run_id = ?",
        (json.dumps({"kind": "health", "step": 1, "dropped": {"x": 10**400}, "faults": {}}),),
    ),
    "counters less than none": (
        "update boots set health = ? where run_id = ?",
        (json.dumps({"kind": "health", "step": 1, "dropped": {"queue_full": -5}, "faults": {"sender": -1}}),),
    ),
    "health that is no JSON": ("update boots set health = '{' where run_id = ?", ()),
    "a description that is no JSON": ("update boots set description = '{' where run_id = ?", ()),
    "a description of other types": (
        "update boots set description = ? where run_id = ?",
        (json.dumps({"policy": "yes", "mitigation": [], "labels": 3, "versions": None, "world_size": "x"}),),
    ),
    "layers that are none": ("update topologies set layers = '[{}]' where ? is not null", ()),
    "a warning that is none": ("update warnings set verdict = '{}' where run_id = ?", ()),
    "an event without its words": ("update events set payload = '{}' where run_id = ?", ()),
    "an answer that is none": ("update command_ranks set switched = '{}' where ? is not null", ()),
    "a mode of another world": ("update commands set mode = ?, expect = '' where run_id = ?", (TEXT,)),
    "a mode of another world in an event": ("update events set mode = ? where run_id = ?", (TEXT,)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.full] * (n % 3 > 0)) for n, what in enumerate(WOUNDS)]
)
def test_corrupt_row_is_skipped_and_counted(play: Any, tmp_path: Path, what: str) -> None:
    statement, values = WOUNDS[what]
    good, bad = FakeRank(run="good"), FakeRank(run="bad")
    good.layers = tuple(layer.model_copy(update={"name": "other"}) for layer in good.layers)  # a topology of its own
    second = FakeRank(run="bad", rank=1, boot="b2")
    kept: dict[str, Any] = {}

    async def before(service: Any) -> None:
        for rank in (good, bad, second):
            events = rank.started(), rank.sample(1), rank.sample(2), rank.verdict(2), AgentHealth(step=2)
            ack = await service.store(rank, *events)
        called_for = {**switched("exact_delta"), "id": "s-1", "verdict": "warn-1", "heads": [[0, 2]]}
        await service.store(bad, Switched.model_validate(called_for))
        ack = await service.store(second, second.sample(3))
        await service.store(second, second.answer(ack.commands[0], 3))
        ordered = {"who": "a", "reason": "b", "heads": [[0, 0]], "mode": "exact_delta"}
        assert (await service.client.post("/v1/runs/bad/commands", json=ordered)).status_code == 201
        kept.update(await every_answer(service, "good", "bad"))

    play(before)
    with sqlite3.connect(tmp_path / "foreshock.db") as database:
        bad_id = database.execute("select id from runs where name = 'bad'").fetchone()[0]
        if "topologies" in statement:
            digest = database.execute("select topology from boots where run_id = ?", [bad_id]).fetchone()[0]
            statement, values = "update topologies set layers = '[{}]' where hash = ?", ()
            bad_id = digest
        assert database.execute(statement, [*values, bad_id]).rowcount

    async def after(service: Any) -> None:
        found = await every_answer(service, "good", "bad")
        for path in (path.format(run="good") for path in READS if "{run}" in path):
            assert found[path] == kept[path]
        own = [line for line in kept["/metrics"].splitlines() if 'run="good"' in line]
        assert [line for line in found["/metrics"].splitlines() if 'run="good"' in line] == own
        assert [run["run"] for run in found["/v1/runs"]["runs"]] == [run["run"] for run in kept["/v1/runs"]["runs"]]
        for rank in (good, bad, second):  # and all go on sending
            await service.store(rank, rank.sample(4))
        await every_answer(service, "good", "bad")
        if "mode of another world in" not in what:
            assert unreadable(found["/metrics"]) > 0

    play(after)


def unreadable(exposition: str) -> float:
    """How many rows the service says it could not read."""
    lines = [line for line in exposition.splitlines() if line.startswith("foreshock_service_unreadable_rows ")]
    return float(lines[0].split()[-1]) if lines else 0.0
