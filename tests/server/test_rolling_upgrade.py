"""Agents, services and stores of 0.1.0 and of this version, in every combination: nothing is lost in either order."""

import asyncio
import json
import math
import sqlite3
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError
from tests.server import version_0_1_0 as old

from foreshock.contract import version_0_1_0, wire
from foreshock.server.store.reading import unreadable
from foreshock.server.testing import FakeRank

pytestmark = pytest.mark.promise("S16")
JSON = {"content-type": "application/json"}


async def answer_at(service: Any, address: str) -> Any:
    """The JSON at an address with its query."""
    answer = await service.client.get(address)
    assert answer.status_code == 200, (address, answer.text)
    return answer.json()


# ---- an old agent, the new service ----------------------------------------------------------------------------------


def test_the_golden_batches_hold_every_kind_of_event_that_0_1_0_had() -> None:
    kinds = get_args(get_args(old.reader().Event)[0])
    sent = {event["kind"] for e in old.exchanges() for event in e["batch"]["events"]}
    assert sent == {kind.model_fields["kind"].default for kind in kinds}
    assert {e["status"] for e in old.exchanges()} == {200}


def test_every_batch_of_an_old_agent_is_read_as_it_was_written() -> None:
    for exchange in old.exchanges():
        text = json.dumps(exchange["batch"])
        batch = wire.read_batch(text.encode())
        assert batch.revision == 0
        written = json.loads(batch.model_dump_json(exclude_unset=True))
        assert written == json.loads(old.reader().Batch.model_validate_json(text).model_dump_json(exclude_unset=True))


def test_an_old_agents_run_is_stored_answered_in_its_own_terms_and_shown_as_it_was(play: Any) -> None:
    """The orders of the golden exchanges are not given again: only what the agents said is compared."""
    shown = old.answers()

    async def holds_soon(service: Any, path: str, was: Any) -> None:
        """Roll-ups, which are float32, and norms that are added up of parts come a moment after the batches."""
        last = time.monotonic() + 20
        while True:
            try:
                return assert_holds(await answer_at(service, path), was, path, within=1e-6)
            except AssertionError:
                if time.monotonic() > last:
                    raise
            await asyncio.sleep(0.2)

    async def story(service: Any) -> None:
        for exchange in old.exchanges():
            batch = exchange["batch"]
            answer = await service.client.post("/v1/batches", content=json.dumps(batch), headers=JSON)
            assert answer.status_code == 200, answer.text
            ack = old.reader().Ack.model_validate_json(answer.content)
            assert (ack.boot, ack.acknowledged) == (batch["boot"], batch["sequence"])
        for path, was in shown.items():
            if any(word in path for word in ("/series", "/curves", "/matrix")):
                await holds_soon(service, path, was)

    play(story, verify_steps=0)


@pytest.mark.parametrize("mode", ["row_corrected", "exact_delta+centred_keys"])
def test_an_old_agent_is_never_ordered_what_it_cannot_read(play: Any, monkeypatch: Any, mode: str) -> None:
    async def story(service: Any) -> None:
        ranks = [FakeRank(rank=number) for number in (0, 1)]
        ranks[0].revision = 0  # an agent of 0.1.0
        for rank in ranks:
            await service.store(rank, rank.started())
        order = {"who": "ann", "reason": "drift", "heads": [[0, 1]], "mode": mode}
        made = await service.client.post("/v1/runs/run-1/commands", json=order)
        assert made.status_code == 201, made.text
        ordered = made.json()["id"]
        answer = await service.post(ranks[0].batch(ranks[0].sample(1)))
        assert old.reader().Ack.model_validate_json(answer.content).commands == ()
        [command] = (await service.store(ranks[1], ranks[1].sample(1))).commands
        await service.store(ranks[1], ranks[1].answer(command, 2))
        status = await service.get(f"/v1/commands/{ordered}")
        assert [rank["outcome"] for rank in status["ranks"]] == ["refused", "applied"]
        assert "is a first build and does not know" in status["ranks"][0]["reason"]
        assert status["state"] == "refused"

    play(story)


# ---- a new agent, the old service -----------------------------------------------------------------------------------


def newest_batch() -> dict[str, Any]:
    """What an agent of a version to come may send: more slots, fields, kinds, modes and causes."""
    rank = FakeRank()
    switched = rank.answer(wire.Command(id="c", mode="row_corrected", reason="", issued_by="ann"), 3)
    batch: dict[str, Any] = json.loads(
        rank.batch(rank.started(), rank.sample(1), rank.verdict(2), switched).model_dump_json()
    )  # fmt: skip
    batch["tide"] = "high"
    started, sample, verdict, _ = batch["events"]
    started |= {"scope": "layer", "mitigation": "row_corrected"}
    started["layers"][0]["colour"] = [1, 2]
    words = wire.Array.model_validate(sample["states"]).numpy()
    sample["states"] = wire.Array.of(np.concatenate([words, words[:, :3]], axis=1)).model_dump()
    sample["moon"] = {"phase": 1}
    verdict["cause"] = "rounding of weights"
    batch["events"].append({"kind": "eclipse", "step": 3})
    return batch


def test_what_the_old_service_refuses_of_a_newer_agent_it_takes_in_its_own_form() -> None:
    payload = json.dumps(newest_batch()).encode()
    with pytest.raises(ValidationError):
        old.reader().Batch.model_validate_json(payload)
    form = version_0_1_0.batch(payload)
    assert form is not None
    read = old.reader().Batch.model_validate_json(form)
    started, sample, verdict, switched = read.events
    assert started.mitigation == "exact_delta"
    assert sample.words().tolist() == FakeRank().words(1)[:, :13].tolist()
    assert (verdict.cause, verdict.sentence) == ("other", "layer 0 head 2 drifts")
    assert (switched.heads, switched.after, switched.command) == ((), (), "c")  # nothing that it would order onwards
    assert "layer 0 head 0 from plain to row_corrected" in switched.reason


def test_every_batch_of_today_is_refused_whole_by_the_old_reader_so_that_its_form_is_asked_for() -> None:
    rank = FakeRank()
    with pytest.raises(ValidationError, match="revision"):
        old.reader().Batch.model_validate_json(rank.batch(rank.sample(1)).model_dump_json())


def test_a_golden_batch_is_in_the_form_of_0_1_0_already_and_so_it_is_after_a_newer_agent_wrote_it() -> None:
    for exchange in old.exchanges():
        assert version_0_1_0.batch(json.dumps(exchange["batch"]).encode()) is None
        form = version_0_1_0.batch(json.dumps({**exchange["batch"], "revision": 1}).encode())
        assert form is not None
        assert json.loads(form) == exchange["batch"]


def test_a_batch_of_which_the_old_service_knows_nothing_has_no_form() -> None:
    said = {**newest_batch(), "events": [{"kind": "eclipse"}]}
    assert version_0_1_0.batch(json.dumps(said).encode()) is None


# ---- a newer agent, this service ------------------------------------------------------------------------------------


def test_this_service_takes_a_newer_agents_batch_whole_and_keeps_even_the_slots_it_cannot_read(
    play: Any, tmp_path: Path
) -> None:
    said = newest_batch()
    said["events"][2]["cause"] = "rounding"  # a cause is a choice: who adds one sends what is refused in the old form

    async def story(service: Any) -> None:
        answer = await service.client.post("/v1/batches", content=json.dumps(said), headers=JSON)
        assert answer.status_code == 200, answer.text
        found = await service.get("/v1/runs/run-1")
        assert found["mitigation"] == "row_corrected"
        own = await service.get("/v1/runs/run-1/matrix", metric="head.score_max")
        assert own["values"][0][0] == FakeRank().words(1).view(np.float64)[0, 6]

    play(story)
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


def test_an_old_store_is_opened_brought_up_to_date_and_read_at_every_address(play: Any, tmp_path: Path) -> None:
    old.store_at(tmp_path / "foreshock.db")
    unreadable.clear()  # what tests before this one left in this process
    with sqlite3.connect(tmp_path / "foreshock.db") as database:  # as if it had been left a minute ago
        database.execute("update runs set last_seen = ?", [time.time()])
        database.execute("update commands set expires = ? where expires is not null", [time.time() + 3600])
    was = old.answers()

    async def story(service: Any) -> None:
        for path, answered in was.items():
            if path == "/metrics":
                continue
            now = await answer_at(service, path)
            if path == "/v1/catalog":
                known = {metric["key"]: metric for metric in now["metrics"]}
                assert {metric["key"] for metric in answered["metrics"]} <= known.keys()
                continue
            assert_holds(timeless(now), timeless(answered), path)
        metrics = (await service.client.get("/metrics")).text
        missing = series_of(was["/metrics"]) - series_of(metrics)
        assert not missing
        assert "foreshock_service_unreadable_rows 0.0" in metrics
        warned = 0  # runs recorded before there were incidents have them all the same
        for row in (await service.get("/v1/runs", limit=500))["runs"]:
            found = (await service.get(f"/v1/runs/{row['run']}/incidents"))["incidents"]
            heads = {(w["layer"], w["head"]) for w in (await service.get(f"/v1/runs/{row['run']}"))["warnings"]}
            shown = {(h["layer"], h["head"]) for i in found for h in i["heads"] if h["state"] != "quiet"}
            assert shown == heads, row["run"]
            warned += bool(heads)
        assert warned
        audit = await service.get("/v1/audit", limit=500)
        assert audit["intact"]
        # ... and it is written on: the run goes on where it stood, and its open order is delivered
        first = FakeRank(run="golden/ranks", rank=0, boot="b0")
        first.revision, first.sequence = 0, 1000
        [order] = (await service.store(first, first.sample(1500, 1400))).commands
        assert order.mode == "stable_softmax"
        await service.store(first, first.answer(order, 1500))
        assert (await service.get("/v1/runs/golden/ranks/matrix", metric="head.mode"))["step"] == 1500

    play(story, verify_steps=0, finished_run_seconds=1e6, silent_run_seconds=1e6)


_CLOCKS = {"first_seen_unix_seconds", "last_seen_unix_seconds", "expires_unix_seconds"}


def timeless(value: Any) -> Any:
    """An answer without what the test moved or the clock moves."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in _CLOCKS}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def series_of(exposition: str) -> set[str]:
    """Every series about runs with its value, without those that tell the time."""
    lines = (line for line in exposition.splitlines() if 'run="' in line)
    return {line for line in lines if not line.startswith(("foreshock_run_last_", "foreshock_run_silent"))}


def test_the_state_that_an_old_agent_saved_is_taken_up() -> None:
    torch = pytest.importorskip("torch")
    from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
    from foreshock.monitor.switch import Switchboard

    state = json.loads((old.FILES / "agent_state.json").read_text("utf-8"))
    heads = [(layer, head) for layer, head in state["detectors"]["heads"]]
    board = Switchboard(heads, torch.zeros(len(heads), dtype=torch.int32), lambda: "id")
    board.load_state_dict(state["switch"])
    assert board.modes()[1, 0] == 1
    detectors = Detectors(heads, DetectorConfig())
    detectors.load_state_dict(state["detectors"])
    again = detectors.state_dict()
    assert again["step"] == state["detectors"]["step"] == 4
    assert math.isfinite(float(np.nansum(detectors.risk)))


@pytest.mark.parametrize("scope", ["head", "model", "of_tomorrow", None])
def test_a_run_shows_what_a_warning_switches_where_its_agent_tells_it(play: Any, scope: str | None) -> None:
    async def story(service: Any) -> None:
        rank = FakeRank()
        await service.store(rank, rank.started().model_copy(update={"switch_scope": scope}))
        assert (await service.get("/v1/runs/run-1"))["switch_scope"] == scope

    play(story)
    with pytest.raises(ValidationError):
        wire.Started.model_validate({**FakeRank().started().model_dump(), "switch_scope": "a head!"})


def test_an_old_service_is_told_no_scope() -> None:
    rank = FakeRank()
    started = rank.started().model_copy(update={"switch_scope": "model"})
    written = version_0_1_0.batch(rank.batch(started).model_dump_json().encode())
    assert written is not None
    assert "switch_scope" not in json.loads(written)["events"][0]
    old.reader().Batch.model_validate_json(written)
