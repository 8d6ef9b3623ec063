"""The sender against servers that are well, down, slow, hostile or lying; real sockets throughout."""

import json
import socket
import time
from pathlib import Path
from typing import Any, Final

import pytest
from tests.faults.hostile_server import (
    HostileServer,
    acknowledge,
    answer,
    close_mid_body,
    closed_port,
    drip,
    endless,
    hang,
    hostile_server,
    reply,
)
from tests.faults.sending import BUSY_SECONDS, IN_ORDER_SECONDS, eventually, sample, send, started_sender, steps_at

from foreshock.contract import wire


def told_beside(server: HostileServer, header: str) -> list[tuple[str, str | None]]:
    """(process start, value of the header) of every request."""
    heads = [dict(line.split(": ", 1) for line in head.lower().splitlines()[1:]) for head in server.headers]
    return [(batch["boot"], head.get(header)) for batch, head in zip(server.batches, heads, strict=True)]


@pytest.mark.promise("S2")
@pytest.mark.parametrize("apart_seconds", [90.0, -60.0])
def test_every_batch_tells_how_old_its_process_is_and_those_of_a_dead_one_that_they_are_replayed(
    tmp_path: Path, quick_retries: None, apart_seconds: float
) -> None:
    """Where the dead one's node had a clock that was ahead, it is at least as old as who found its spool."""
    now = 1_800_000_000_000
    dead_boot, own_boot = f"{now - int(apart_seconds * 1000)}-0-dead", f"{now}-0-beef"
    dead = started_sender(closed_port(), tmp_path, boot=dead_boot)
    send(dead, 1)
    dead.close(IN_ORDER_SECONDS)
    with hostile_server(acknowledge) as server:
        own = started_sender(server.url, tmp_path, boot=own_boot)
        send(own, 2)
        eventually("both are sent", lambda: steps_at(server) == [1, 2])
        own.close(2)
    ages = {boot: float(age or "nan") for boot, age in told_beside(server, wire.AGE_HEADER)}
    assert dict(told_beside(server, wire.REPLAYED_HEADER)) == {dead_boot: "true", own_boot: None}
    assert 0 <= ages[own_boot] < 60
    assert abs(ages[dead_boot] - ages[own_boot] - max(apart_seconds, 0)) < 20


STARTED: Final = wire.Started(step=0, unix_seconds=0.0, layers=(), policy="auto", numerics="kernel")


@pytest.mark.promise("S16")
def test_a_service_that_asks_what_is_watched_is_told_in_the_next_batch_but_not_in_each(tmp_path: Path) -> None:
    with hostile_server(acknowledge) as server:
        server.asks_for = "boot-1"
        made = started_sender(server.url, tmp_path, heartbeat_seconds=0.3)
        made.put(STARTED)
        send(made, 1)
        eventually("it is told again, and again", lambda: len(server.events("started")) == 3)
        assert server.requests_at[-1] - server.requests_at[0] >= 0.6, "a service that always asks is not told always"
        server.asks_for = None
        send(made, 2)
        made.close(5)
        assert steps_at(server) == [1, 2]
        assert {event["step"] for event in server.events("started")} == {STARTED.step}


@pytest.mark.promise("A2")
@pytest.mark.parametrize("behaviour", [hang, drip, close_mid_body, endless])
def test_a_slow_or_broken_answer_ends_at_the_deadline_and_the_batch_is_sent_again(
    behaviour: Any, quick_retries: None
) -> None:
    with hostile_server(behaviour) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("a second try", lambda: len(server.requests_at) >= 2)
        server.behaviour = acknowledge
        send(to, 2)
        eventually("all is stored", lambda: steps_at(server) == [1, 2] and len(server.batches) > 2)
        to.close(2)
        assert to.dropped == {}


@pytest.mark.promise("A2")
def test_a_server_that_never_finishes_tls_is_given_up_at_the_deadline(quick_retries: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        to = started_sender(f"https://127.0.0.1:{listener.getsockname()[1]}")
        send(to, 1)
        eventually("two tries", lambda: to._failures >= 2)
        began = time.monotonic()
        to.close(1)
        assert time.monotonic() - began < 1 + BUSY_SECONDS


MALFORMED = {
    "html": (b"<html>welcome</html>", ()),
    "cut": (b'{"boot":"boot-1","acknow', ()),
    "another boot": (b'{"boot":"boot-9","acknowledged":1,"commands":[]}', ()),
    "a future sequence": (b'{"boot":"boot-1","acknowledged":999,"commands":[]}', ()),
    "an older sequence": (b'{"boot":"boot-1","acknowledged":0,"commands":[]}', ()),
    "nothing": (b"", ()),
    "a gzip header on plain text": (b"not gzip", ("Content-Encoding: gzip",)),
    "a bad charset": (b'{"boot":"\xff\xfe"}', ("Content-Type: application/json; charset=klingon",)),
    "nested deep": (b"[" * 100_000, ()),
    "no name for a mode": (
        b'{"boot":"boot-1","acknowledged":1,"commands":[{"id":"c","mode":"","reason":"","issued_by":""}]}',
        (),
    ),
    "more than may be read": (b" " * (wire.MAX_ACK_BYTES + 1), ()),
}


@pytest.mark.promise("A4")
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_acknowledges_nothing_and_raises_nothing(name: str, quick_retries: None) -> None:
    body, headers = MALFORMED[name]
    with hostile_server(answer(200, *headers, body=body)) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("it is sent again", lambda: len(server.batches) >= 2)
        server.behaviour = acknowledge
        eventually("it is stored", lambda: not len(to._own))
        assert set(server.sequences()) == {1}
        assert to.commands() == []
        to.close(2)
        assert to.faults == {}
        assert to.dropped == {}


def test_an_answer_of_a_newer_service_is_taken_with_orders_and_fields_that_are_not_known_here() -> None:
    def newer(_server: HostileServer, connection: socket.socket, body: bytes) -> None:
        order = {"id": "c", "mode": "faster_rows", "reason": "", "issued_by": "ann", "urgency": 3}
        said = {"boot": "boot-1", "acknowledged": json.loads(body)["sequence"], "commands": [order], "weather": "fine"}
        reply(connection, 200, json.dumps(said).encode())

    with hostile_server(newer) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("the acknowledgement", lambda: to._commands)
        to.close(2)
        assert ([order.mode for order in to.commands()], to.dropped, to.faults) == (["faster_rows"], {}, {})
        assert server.sequences() == [1]


@pytest.mark.promise("A1")
def test_with_no_server_the_queue_is_bounded_samples_go_first_and_losses_are_counted() -> None:
    to = started_sender(closed_port(), queue_bytes=2**16)
    for step in range(1, 500):
        to.put(sample(step))
        if step % 50 == 0:
            time.sleep(0.03)
    finished = wire.Finished(step=500, unix_seconds=0.0, status="completed")
    to.put(finished)
    to.close(IN_ORDER_SECONDS)
    assert to.dropped["queue_full"] > 0
    waiting = [json.loads(payload) for _, payload in to._own._batches]  # type: ignore[union-attr]
    kept = [event for batch in waiting for event in batch["events"]]
    assert len(kept) + to.dropped["queue_full"] == 500
    assert len(b"".join(payload for _, payload in to._own._batches)) <= 2**16 * 3 // 2  # type: ignore[union-attr]
    assert kept[-1]["kind"] == "finished"


@pytest.mark.promise("A8")
def test_what_a_dead_server_never_took_is_sent_at_the_next_start(tmp_path: Path, quick_retries: None) -> None:
    first = started_sender(closed_port(), tmp_path)
    send(first, *range(1, 31))
    first.close(IN_ORDER_SECONDS)
    with hostile_server(acknowledge) as server:
        second = started_sender(server.url, tmp_path, boot="boot-2")
        send(second, 31)
        eventually("everything", lambda: steps_at(server) == [*range(1, 32)])
        second.close(2)
        assert server.sequences("boot-1") == [*range(1, len(server.sequences("boot-1")) + 1)]
    assert list(tmp_path.rglob("*.spool")) == []


@pytest.mark.promise("A5")
@pytest.mark.promise("A17")
@pytest.mark.parametrize("trouble", ["not a directory", "open to others", "vanished", "disk full"])
def test_without_a_disk_the_way_through_memory_goes_on(
    trouble: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quick_retries: None,
) -> None:
    folder = tmp_path / "spool"
    if trouble == "not a directory":
        folder.write_text("a file")
    if trouble == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    with hostile_server(answer(503)) as server:
        to = started_sender(server.url, folder)
        send(to, 1)
        eventually("a try", lambda: server.batches)
        if trouble == "vanished":
            for path in folder.rglob("*.spool"):
                path.unlink()
        if trouble == "disk full":

            def full(*args: Any) -> int:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("foreshock.monitor.transport.spool._pwrite", full)
        send(to, 2)
        time.sleep(0.1)
        server.behaviour = acknowledge
        eventually("both", lambda: steps_at(server) == [1, 2] and not any(len(s) for s in to._stores))
        to.close(2)
        assert to.faults["spool"] == (0 if trouble == "vanished" else 1)
        assert to.dropped == {}
    said = [record.getMessage() for record in caplog.records if "the spool is off" in record.getMessage()]
    assert len(said) == to.faults["spool"]
    if trouble == "open to others":
        assert f"unsent batches stay in memory: {folder} may be written to by others" in said[0]
        assert list(folder.iterdir()) == []


def test_a_quiet_agent_reports_its_health_and_fetches_commands_with_it() -> None:
    with hostile_server(acknowledge) as server:
        server.commands = [{"id": "c1", "mode": "exact_delta", "reason": "a test", "issued_by": "ada"}]
        to = started_sender(server.url, heartbeat_seconds=0.1)
        eventually("a command", lambda: to._commands)
        to.close(2)
        (health, *_) = server.events("health")
        assert (health["step"], health["faults"]) == (7, {"detectors": 1})
        assert [c.id for c in to.commands()] == ["c1"]


@pytest.mark.promise("A10")
def test_after_a_long_stall_every_event_arrives_in_few_numbered_batches(quick_retries: None) -> None:
    """One connection, one request at a time; the first batch was tried before."""
    with hostile_server(hang) as server:
        to = started_sender(server.url)
        for step in range(1, 200):
            send(to, step)
            time.sleep(0.002)
        server.behaviour = acknowledge
        eventually("everything", lambda: steps_at(server) == [*range(1, 200)])
        to.close(IN_ORDER_SECONDS)
        assert len(server.batches) < 60
        assert sorted(set(server.sequences())) == [*range(1, max(server.sequences()) + 1)]
        assert to.dropped == {}


@pytest.mark.promise("S16")
def test_nobody_says_for_a_dead_process_what_it_watched(tmp_path: Path, quick_retries: None) -> None:
    dead = started_sender(closed_port(), tmp_path, boot="1-0-dead")
    send(dead, 1)
    dead.close(IN_ORDER_SECONDS)
    with hostile_server(acknowledge) as server:
        server.asks_for = "1-0-dead"
        own = started_sender(server.url, tmp_path, boot="2-0-beef", heartbeat_seconds=0.1)
        time.sleep(0.2)  # past the time within which nobody would tell it again anyway
        own.put(STARTED)
        eventually("the dead one's are sent", lambda: server.sequences("1-0-dead") == [1])
        send(own, 2)
        own.close(5)
        assert len(server.events("started")) == 1
