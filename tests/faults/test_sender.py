"""The sender with servers that are healthy, down, slow or hostile, over real sockets."""

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


def header_values(server: HostileServer, header: str) -> list[tuple[str, str | None]]:
    """(process start, value of the header) of every request."""
    heads = [dict(line.split(": ", 1) for line in head.lower().splitlines()[1:]) for head in server.headers]
    return [(batch["boot"], head.get(header)) for batch, head in zip(server.batches, heads, strict=True)]


@pytest.mark.promise("S2")
@pytest.mark.parametrize("dead_earlier_seconds", [90.0, -60.0])
def test_batches_carry_process_age_and_spooled_ones_are_marked_as_replayed(
    tmp_path: Path, quick_retries: None, dead_earlier_seconds: float
) -> None:
    """If the clock of the dead process was ahead, its age is at least that of the process that found its spool."""
    now = 1_800_000_000_000
    dead_boot, own_boot = f"{now - int(dead_earlier_seconds * 1000)}-0-dead", f"{now}-0-beef"
    dead = started_sender(closed_port(), tmp_path, boot=dead_boot)
    send(dead, 1)
    dead.close(IN_ORDER_SECONDS)
    with hostile_server(acknowledge) as server:
        own = started_sender(server.url, tmp_path, boot=own_boot)
        send(own, 2)
        eventually("both steps are sent", lambda: steps_at(server) == [1, 2])
        own.close(2)
    ages = {boot: float(age or "nan") for boot, age in header_values(server, wire.AGE_HEADER)}
    assert dict(header_values(server, wire.REPLAYED_HEADER)) == {dead_boot: "true", own_boot: None}
    assert 0 <= ages[own_boot] < 60
    assert abs(ages[dead_boot] - ages[own_boot] - max(dead_earlier_seconds, 0)) < 20


STARTED: Final = wire.Started(step=0, unix_seconds=0.0, layers=(), policy="auto", numerics="kernel")


@pytest.mark.promise("S16")
def test_requested_started_event_is_sent_again_at_a_limited_rate(tmp_path: Path) -> None:
    with hostile_server(acknowledge) as server:
        server.asks_for = "boot-1"
        sender_of_boot = started_sender(server.url, tmp_path, heartbeat_seconds=0.3)
        sender_of_boot.put(STARTED)
        send(sender_of_boot, 1)
        eventually("the event is sent three times", lambda: len(server.events("started")) == 3)
        assert server.requests_at[-1] - server.requests_at[0] >= 0.6, "repeated requests must be rate-limited"
        server.asks_for = None
        send(sender_of_boot, 2)
        sender_of_boot.close(5)
        assert steps_at(server) == [1, 2]
        assert {event["step"] for event in server.events("started")} == {STARTED.step}


@pytest.mark.promise("A2")
@pytest.mark.parametrize("behaviour", [hang, drip, close_mid_body, endless])
def test_slow_or_broken_reply_times_out_and_the_batch_is_resent(behaviour: Any, quick_retries: None) -> None:
    with hostile_server(behaviour) as server:
        sender = started_sender(server.url)
        send(sender, 1)
        eventually("a second try", lambda: len(server.requests_at) >= 2)
        server.behaviour = acknowledge
        send(sender, 2)
        eventually("everything is stored", lambda: steps_at(server) == [1, 2] and len(server.batches) > 2)
        sender.close(2)
        assert sender.dropped == {}


@pytest.mark.promise("A2")
def test_stalled_tls_handshake_times_out(quick_retries: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = started_sender(f"https://127.0.0.1:{listener.getsockname()[1]}")
        send(sender, 1)
        eventually("two tries", lambda: sender._failures >= 2)
        began = time.monotonic()
        sender.close(1)
        assert time.monotonic() - began < 1 + BUSY_SECONDS


MALFORMED = {
    "html": (b"<html>welcome</html>", ()),
    "cut": (b'{"boot":"boot-1","acknow', ()),
    "another boot": (b'{"boot":"boot-9","acknowledged":1,"commands":[]}', ()),
    "a future sequence": (b'{"boot":"boot-1","acknowledged":999,"commands":[]}', ()),
    "an older sequence": (b'{"boot":"boot-1","acknowledged":0,"commands":[]}', ()),
    "empty": (b"", ()),
    "a gzip header on plain text": (b"not gzip", ("Content-Encoding: gzip",)),
    "a bad charset": (b'{"boot":"\xff\xfe"}', ("Content-Type: application/json; charset=klingon",)),
    "deeply nested": (b"[" * 100_000, ()),
    "empty mode name": (
        b'{"boot":"boot-1","acknowledged":1,"commands":[{"id":"c","mode":"","reason":"","issued_by":""}]}',
        (),
    ),
    "too large": (b" " * (wire.MAX_ACK_BYTES + 1), ()),
}


@pytest.mark.promise("A4")
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_reply_acknowledges_nothing_and_raises_nothing(name: str, quick_retries: None) -> None:
    body, headers = MALFORMED[name]
    with hostile_server(answer(200, *headers, body=body)) as server:
        sender = started_sender(server.url)
        send(sender, 1)
        eventually("the batch is resent", lambda: len(server.batches) >= 2)
        server.behaviour = acknowledge
        eventually("the batch is stored", lambda: not len(sender._own))
        assert set(server.sequences()) == {1}
        assert sender.commands() == []
        sender.close(2)
        assert sender.faults == {}
        assert sender.dropped == {}


def test_reply_with_unknown_mode_and_fields_is_accepted() -> None:
    def newer_service(_server: HostileServer, connection: socket.socket, body: bytes) -> None:
        order = {"id": "c", "mode": "faster_rows", "reason": "", "issued_by": "ann", "urgency": 3}
        ack = {"boot": "boot-1", "acknowledged": json.loads(body)["sequence"], "commands": [order], "weather": "fine"}
        reply(connection, 200, json.dumps(ack).encode())

    with hostile_server(newer_service) as server:
        sender = started_sender(server.url)
        send(sender, 1)
        eventually("the acknowledgement", lambda: sender._commands)
        sender.close(2)
        assert ([order.mode for order in sender.commands()], sender.dropped, sender.faults) == (["faster_rows"], {}, {})
        assert server.sequences() == [1]


@pytest.mark.promise("A1")
def test_queue_without_a_server_is_bounded_and_counts_dropped_samples() -> None:
    sender = started_sender(closed_port(), queue_bytes=2**16)
    for step in range(1, 500):
        sender.put(sample(step))
        if step % 50 == 0:
            time.sleep(0.03)
    finished = wire.Finished(step=500, unix_seconds=0.0, status="completed")
    sender.put(finished)
    sender.close(IN_ORDER_SECONDS)
    assert sender.dropped["queue_full"] > 0
    waiting = [json.loads(payload) for _, payload in sender._own._batches]  # type: ignore[union-attr]
    stored_events = [event for batch in waiting for event in batch["events"]]
    assert len(stored_events) + sender.dropped["queue_full"] == 500
    assert len(b"".join(payload for _, payload in sender._own._batches)) <= 2**16 * 3 // 2  # type: ignore[union-attr]
    assert stored_events[-1]["kind"] == "finished"


@pytest.mark.promise("A8")
def test_unsent_batches_are_sent_in_order_at_the_next_start(tmp_path: Path, quick_retries: None) -> None:
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
@pytest.mark.parametrize("problem", ["not a directory", "open to others", "vanished", "disk full"])
def test_unusable_spool_falls_back_to_memory(
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quick_retries: None,
) -> None:
    folder = tmp_path / "spool"
    if problem == "not a directory":
        folder.write_text("a file")
    if problem == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    with hostile_server(answer(503)) as server:
        sender = started_sender(server.url, folder)
        send(sender, 1)
        eventually("a try", lambda: server.batches)
        if problem == "vanished":
            for path in folder.rglob("*.spool"):
                path.unlink()
        if problem == "disk full":

            def disk_full(*args: Any) -> int:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("foreshock.monitor.transport.spool._pwrite", disk_full)
        send(sender, 2)
        time.sleep(0.1)
        server.behaviour = acknowledge
        eventually("both steps arrive", lambda: steps_at(server) == [1, 2] and not any(len(s) for s in sender._stores))
        sender.close(2)
        assert sender.faults["spool"] == (0 if problem == "vanished" else 1)
        assert sender.dropped == {}
    logged = [record.getMessage() for record in caplog.records if "the spool is off" in record.getMessage()]
    assert len(logged) == sender.faults["spool"]
    if problem == "open to others":
        assert f"unsent batches stay in memory: {folder} may be written to by others" in logged[0]
        assert list(folder.iterdir()) == []


def test_idle_agent_sends_heartbeats_and_receives_commands() -> None:
    with hostile_server(acknowledge) as server:
        server.commands = [{"id": "c1", "mode": "exact_delta", "reason": "a test", "issued_by": "ada"}]
        sender = started_sender(server.url, heartbeat_seconds=0.1)
        eventually("a command", lambda: sender._commands)
        sender.close(2)
        (health, *_) = server.events("health")
        assert (health["step"], health["faults"]) == (7, {"detectors": 1})
        assert [c.id for c in sender.commands()] == ["c1"]


@pytest.mark.promise("A10")
def test_events_queued_during_a_stall_arrive_in_few_consecutive_batches(quick_retries: None) -> None:
    """One connection sends one request at a time; the first batch is a retry."""
    with hostile_server(hang) as server:
        sender = started_sender(server.url)
        for step in range(1, 200):
            send(sender, step)
            time.sleep(0.002)
        server.behaviour = acknowledge
        eventually("everything", lambda: steps_at(server) == [*range(1, 200)])
        sender.close(IN_ORDER_SECONDS)
        assert len(server.batches) < 60
        assert sorted(set(server.sequences())) == [*range(1, max(server.sequences()) + 1)]
        assert sender.dropped == {}


@pytest.mark.promise("S16")
def test_started_event_is_not_sent_for_a_dead_process(tmp_path: Path, quick_retries: None) -> None:
    dead = started_sender(closed_port(), tmp_path, boot="1-0-dead")
    send(dead, 1)
    dead.close(IN_ORDER_SECONDS)
    with hostile_server(acknowledge) as server:
        server.asks_for = "1-0-dead"
        own = started_sender(server.url, tmp_path, boot="2-0-beef", heartbeat_seconds=0.1)
        time.sleep(0.2)  # longer than the rate limit of repeated `started` events
        own.put(STARTED)
        eventually("the batch of the dead process is sent", lambda: server.sequences("1-0-dead") == [1])
        send(own, 2)
        own.close(5)
        assert len(server.events("started")) == 1
