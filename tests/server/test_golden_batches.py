"""Batches of every released wire version, as they were on the wire, and what the service made of them.

A new version adds files; the old ones never change, since agents of that version are out there.
"""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.server.test_rolling_upgrade import assert_holds

from foreshock.contract.wire import WIRE_VERSION, Batch, Event, Unknown

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = range(1, WIRE_VERSION + 1)
_WHEN = {"first_seen_unix_seconds", "last_seen_unix_seconds", "unix_seconds", "id"}
_SKIPPED = {"revision", "loss_max", "retries", "spool_bytes", "oldest_unsent_seconds"}
"""Fields that agents sent and nothing read."""

pytestmark = pytest.mark.promise("S16")


def lines(version: int) -> list[str]:
    return (GOLDEN / f"wire_{version}.jsonl").read_text("utf-8").splitlines()


def without(names: set[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without(names, inner) for key, inner in value.items() if key not in names}
    return [without(names, inner) for inner in value] if isinstance(value, list) else value


def timeless(value: Any) -> Any:
    """An answer without what depends on the clock or on the order of arrival."""
    return without(_WHEN, value)


async def state_of(service: Any) -> Any:
    """Everything that a reader can ask of the golden run."""
    run = "/v1/runs/golden/run-1"
    state: dict[str, Any] = {"run": timeless(await service.get(run))}
    for metric in ("run.loss", "run.grad_norm", "run.worst_risk"):
        state[metric] = (await service.get(f"{run}/curves", line=metric))["lines"]
    for metric in ("head.score_offset", "head.query_norm", "head.mode"):
        state[metric] = timeless(await service.get(f"{run}/matrix", metric=metric))
    kinds = ["started", "verdict", "switched", "command", "finished"]  # incidents open and close in another order
    found = timeless(await service.get(f"{run}/events", kind=kinds))["events"]
    state["events"] = sorted(found, key=json.dumps)
    return state


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
async def test_the_batches_of_a_released_version_still_mean_what_they_meant(
    service: Any, version: int, order: int
) -> None:
    for line in lines(version)[::order]:
        headers = {"content-type": "application/json"}
        answer = await service.client.post("/v1/batches", content=line, headers=headers)
        assert answer.status_code == 200, answer.text
    meant = json.loads((GOLDEN / f"wire_{version}_state.json").read_text("utf-8"))
    assert_holds(await state_of(service), meant, "state")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_batch_is_written_again_as_it_was_read(version: int) -> None:
    for line in lines(version):
        written = Batch.model_validate_json(line).model_dump_json(exclude_unset=True)
        assert json.loads(written) == without(_SKIPPED, json.loads(line))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_batches_hold_every_kind_of_event_with_every_field(version: int) -> None:
    said: dict[str, set[str]] = {}
    for line in lines(version):
        for event in json.loads(line)["events"]:
            said.setdefault(event["kind"], set()).update(key for key, value in event.items() if value is not None)
    known = [kind for kind in get_args(get_args(Event)[0]) if kind is not Unknown]
    kinds = {kind.model_fields["kind"].default: set(kind.model_fields) for kind in known}
    assert set(said) == set(kinds)
    assert all(said[kind] - _SKIPPED <= fields for kind, fields in kinds.items())
