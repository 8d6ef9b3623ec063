"""The sender against servers that are well, down, slow, hostile or lying; real sockets throughout."""

import ast
import email.utils
import json
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from pydantic import ValidationError
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
from tests.server import version_0_1_0 as old

import foreshock.monitor
from foreshock.contract import wire
from foreshock.contract.slots import identity_row
from foreshock.monitor import AgentConfig
from foreshock.monitor.transport import sender
from foreshock.monitor.transport.retry import is_retryable, retry_after_seconds, retry_delay
from foreshock.monitor.transport.sender import Sender

BUSY_SECONDS = 3.0
"""What a machine with other work may add to a deadline."""
IN_ORDER_SECONDS = 30.0
"""More than a process needs to end in order, its spool written and let go of; it waits no longer than it needs."""


def eventually(what: str, look: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.01)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "retry_delay", lambda failures, retry_after: 0.05)


def started_sender(url: str, spool: Path | None = None, *, boot: str = "boot-1", **settings: Any) -> Sender:
    quick: dict[str, Any] = {"send_every_seconds": 0.02, "request_seconds": 0.4, "heartbeat_seconds": 60}
    config = AgentConfig(run="a-run", url=url, spool_directory=spool, **{**quick, **settings})
    made = Sender(config, run="a-run", boot=boot, health=lambda: (7, {"detectors": 1}))
    made.start()
    return made


def sample(step: int) -> wire.Sample:
    return wire.Sample(step=step, since_step=step - 1, unix_seconds=0.0, loss=float(step))


SWITCHED = wire.Switched(
    id="s", step=1, outcome="applied", heads=((0, 1),), before=("plain",), after=("row_corrected",), reason="auto"
)


def send(to: Sender, *steps: int) -> None:
    for step in steps:
        to.put(sample(step))


def steps_at(server: HostileServer) -> list[int]:
    return sorted({event["step"] for event in server.events("sample")})


# ---- who it is, and whose batches these are --------------------------------------------------------------------------


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


# ---- when to ask again ----------------------------------------------------------------------------------------------


@pytest.mark.promise("A3")
def test_408_429_and_every_5xx_are_asked_again_and_nothing_else() -> None:
    assert [s for s in range(100, 700) if is_retryable(s)] == [408, 429, *range(500, 600)]


@pytest.mark.promise("A3")
@pytest.mark.parametrize("unit", [0.0, 0.5, 1.0])
def test_waiting_doubles_from_one_second_to_sixty_and_is_spread_out(unit: float) -> None:
    delays = [retry_delay(n, None, unit) for n in range(1, 2000)]
    assert all(1 <= delay <= 60 for delay in delays)
    assert delays[:10] == sorted(delays[:10])
    assert retry_delay(20, None, 0.0) < retry_delay(20, None, 1.0)


@pytest.mark.promise("A3")
@pytest.mark.promise("A12")
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("30", 30.0),
        ("1e9", 1e9),
        ("-5", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        (",,,", None),
        ("", None),
        (email.utils.formatdate(1030, usegmt=True), 30.0),
        (email.utils.formatdate(10, usegmt=True), None),
        ("Wed, 99 Foo 2026 99:99:99 GMT", None),
    ],
)
def test_retry_after_is_read_in_both_forms_and_ignored_when_senseless(header: str, seconds: float | None) -> None:
    assert retry_after_seconds(header, now=1000.0) == seconds
    assert 1 <= retry_delay(1, header, 0.5) <= 60


def test_clients_released_by_one_retry_after_do_not_return_together() -> None:
    assert len({retry_delay(1, "20") for _ in range(100)}) > 90


def test_waiting_draws_nothing_from_the_generator_that_shuffles_the_training_data() -> None:
    before = random.getstate()
    retry_delay(3, None)
    assert random.getstate() == before


# ---- servers --------------------------------------------------------------------------------------------------------


def test_every_event_arrives_once_in_numbered_batches() -> None:
    with hostile_server(acknowledge) as server:
        to = started_sender(server.url)
        for step in range(1, 101):
            send(to, step)
            time.sleep(0.001)
        to.close(2)
        assert [event["step"] for event in server.events("sample")] == [*range(1, 101)]
        assert server.sequences() == [*range(1, len(server.batches) + 1)]
        assert to.dropped == {}


@pytest.mark.promise("A2")
@pytest.mark.parametrize("behaviour", [hang, drip, close_mid_body, endless])
def test_a_slow_or_broken_answer_ends_at_the_deadline_and_the_batch_is_sent_again(
    behaviour: Any, quick_retries: None
) -> None:
    with hostile_server(behaviour) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("a second try", lambda: len(server.requests_at) >= 2)
        assert server.requests_at[1] - server.requests_at[0] < 0.4 + 0.05 + 2.0
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
        eventually("two tries", lambda: to.retries >= 2)
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


@pytest.mark.promise("A3")
@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_is_counted_and_never_asked_again(status: int) -> None:
    with hostile_server(answer(status, "Location: http://127.0.0.1:1/")) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("the refusal", lambda: to.dropped)
        server.behaviour = acknowledge
        send(to, 2)
        eventually("the next batch", lambda: 2 in steps_at(server))
        to.close(2)
        assert to.dropped == {f"refused_{status}": 1}
        # 422 may mean that the service is of 0.1.0: the batch is asked for once more, in that version's form
        assert server.sequences() == ([1, 1, 2] if status == 422 else [1, 2])


@pytest.mark.promise("A3")
@pytest.mark.parametrize("status", [301, 307, 308, 401, 403, 404, 409, 415])
def test_what_somebody_can_mend_loses_nothing_and_is_said_once(
    status: int, quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(answer(status, "Location: http://127.0.0.1:1/")) as server:
        to = started_sender(server.url)
        send(to, 1)
        to.put(SWITCHED)
        eventually("tries", lambda: len(server.batches) >= 4)
        server.behaviour = acknowledge  # the token is back
        eventually("it is stored", lambda: not len(to._own))
        to.close(2)
    assert to.dropped == {}
    assert server.events("switched")
    assert [r.message for r in caplog.records if f"answers {status}" in r.message] == [caplog.records[0].message]


@pytest.mark.promise("A3")
def test_a_rotated_token_is_asked_about_a_minute_apart_and_the_next_start_sends_all(tmp_path: Path) -> None:
    with hostile_server(answer(401)) as server:
        to = started_sender(server.url, tmp_path, boot="boot-1")
        to.put(SWITCHED)
        eventually("the first try", lambda: server.batches)
        time.sleep(1.5)
        assert len(server.batches) == 1
        to.close(IN_ORDER_SECONDS)
        server.behaviour = acknowledge
        again = started_sender(server.url, tmp_path, boot="boot-2")
        eventually("the words of the first boot", lambda: server.sequences("boot-1") == [1, 1])
        again.close(2)
    assert (to.dropped, again.dropped) == ({}, {})


@pytest.mark.promise("A3")
def test_a_token_in_a_file_may_be_exchanged_while_the_run_goes_on(tmp_path: Path, quick_retries: None) -> None:
    file = tmp_path / "token"
    file.write_text("of-yesterday\n")
    seen: list[str] = []

    def only_the_new_one(server: HostileServer, connection: socket.socket, body: bytes) -> None:
        head = server.headers[-1]
        seen.append("new" if "Bearer of-today" in head else "old" if "Bearer of-yesterday" in head else "none")
        acknowledge(server, connection, body) if seen[-1] == "new" else reply(connection, 401, b"{}")

    with hostile_server(only_the_new_one) as server:
        to = started_sender(server.url, token_file=file)
        to.put(SWITCHED)
        eventually("the old token is refused", lambda: "old" in seen)
        file.write_text("")  # in the middle of being written
        file.write_text("of-today\n")
        eventually("it is stored", lambda: not len(to._own) and "new" in seen)
        to.close(2)
    assert to.dropped == {}
    assert set(seen) == {"old", "new"}
    with pytest.raises(ValidationError, match=r"missing cannot be read: FileNotFoundError"):
        AgentConfig(token_file=tmp_path / "missing")


@pytest.mark.promise("A3")
def test_a_body_too_large_for_a_proxy_costs_its_samples_and_never_a_word() -> None:
    def small(server: HostileServer, connection: socket.socket, body: bytes) -> None:
        reply(connection, 413, b"{}") if len(body) > 2000 else acknowledge(server, connection, body)

    with hostile_server(small) as server:
        to = started_sender(server.url)
        large = sample(1).model_copy(update={"states": wire.Array.of(np.zeros((300, 16)))})
        to.put(large)
        to.put(SWITCHED)
        eventually("the words", lambda: any([e["kind"] for e in b["events"]] == ["switched"] for b in server.batches))
        to.put(large)
        eventually("the samples are given up", lambda: to.dropped["refused_413"] == 2)
        send(to, 3)
        eventually("what comes after it", lambda: 3 in steps_at(server))
        to.close(2)
    assert to.dropped == {"refused_413": 2}


@pytest.mark.promise("A3")
def test_words_that_no_proxy_takes_are_tried_a_bounded_number_of_times(
    quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_TRIES_TOO_LARGE", 5)
    with hostile_server(answer(413)) as server:
        to = started_sender(server.url)
        to.put(SWITCHED)
        eventually("it is given up", lambda: to.dropped)
        to.close(2)
    assert (to.dropped, len(server.batches)) == ({"refused_413": 1}, 5)


def old_service(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    """As 0.1.0 does: refuse a batch with anything in it that is not known."""
    try:
        old.reader().Batch.model_validate_json(body)
    except ValidationError:
        reply(connection, 422, b'{"detail":"The batch is malformed"}')
    else:
        taken.append(json.loads(body))
        acknowledge(server, connection, body)


taken: list[dict[str, Any]] = []


@pytest.mark.promise("S16")
def test_a_service_of_0_1_0_gets_all_that_it_understands_and_a_later_one_the_rest_from_then_on(tmp_path: Path) -> None:
    taken.clear()
    words = np.tile(identity_row(), (2, 1))
    more = wire.Array.of(np.concatenate([words, words[:, :3]], axis=1))
    switched = wire.Switched(
        id="s", step=1, outcome="applied", heads=((0, 1),), before=("plain",), after=("row_corrected",), reason="auto"
    )
    with hostile_server(old_service) as server:
        to = started_sender(server.url, tmp_path)
        for step in (1, 2, 3):
            to.put(sample(step).model_copy(update={"states": more}))
            to.put(switched)
            eventually("the batch", lambda n=step: any(e["step"] == n for b in taken for e in b["events"]))  # type: ignore[misc]
        server.behaviour = acknowledge  # the service is upgraded
        to.put(sample(4).model_copy(update={"states": more}))
        eventually("the batch of the new service", lambda: 4 in steps_at(server))
        to.close(2)
    assert (to.dropped, to.faults) == ({}, {})
    events = [event for batch in taken for event in batch["events"]]
    assert [e["step"] for e in events if e["kind"] == "sample"] == [1, 2, 3]
    assert {e["states"]["shape"][1] for e in events if e["kind"] == "sample"} == {13}
    assert [e["reason"] for e in events if e["kind"] == "switched"] == [
        "auto (layer 0 head 1 from plain to row_corrected)"
    ] * 3
    assert server.batches[-1]["events"][-1]["states"]["shape"][1] > 13


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


@pytest.mark.promise("A3")
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_trouble_is_asked_again_until_it_passes(status: int, quick_retries: None) -> None:
    with hostile_server(answer(status, "Retry-After: 0")) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("three tries", lambda: len(server.batches) >= 3)
        server.behaviour = acknowledge
        eventually("it is stored", lambda: not len(to._own))
        to.close(2)
        assert to.dropped == {}


@pytest.mark.promise("A3")
def test_back_off_is_real_when_nothing_is_patched() -> None:
    with hostile_server(answer(503)) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("two tries", lambda: len(server.requests_at) >= 2)
        assert server.requests_at[1] - server.requests_at[0] >= 0.95
        began = time.monotonic()
        to.close(2)
        assert time.monotonic() - began < 2 + BUSY_SECONDS


# ---- what waits -----------------------------------------------------------------------------------------------------


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
    waiting = [json.loads(payload) for _, payload in to._own._batches]  # type: ignore[attr-defined]
    kept = [event for batch in waiting for event in batch["events"]]
    assert len(kept) + to.dropped["queue_full"] == 500
    assert len(b"".join(payload for _, payload in to._own._batches)) <= 2**16 * 3 // 2  # type: ignore[attr-defined]
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
@pytest.mark.parametrize("trouble", ["not a directory", "vanished", "disk full"])
def test_without_a_disk_the_way_through_memory_goes_on(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_retries: None
) -> None:
    folder = tmp_path / "spool"
    if trouble == "not a directory":
        folder.write_text("a file")
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
def test_after_a_long_stall_there_is_no_burst(quick_retries: None) -> None:
    with hostile_server(hang) as server:
        to = started_sender(server.url)
        for step in range(1, 200):
            send(to, step)
            time.sleep(0.002)
        server.behaviour = acknowledge
        eventually("everything", lambda: steps_at(server) == [*range(1, 200)])
        to.close(2)
        # one connection, one request at a time, and what waited travelled in few batches
        assert len(server.batches) < 60


# ---- what leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("A16")
def test_the_token_travels_in_one_header_and_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), hostile_server(acknowledge) as server:
        to = started_sender(server.url, token="very-secret-token")
        send(to, 1)
        eventually("a batch", lambda: server.batches)
        to.close(2)
    [head] = server.headers
    assert [line for line in head.split("\r\n") if "very-secret-token" in line] == [
        "Authorization: Bearer very-secret-token"
    ]
    names = {line.partition(":")[0].lower() for line in head.split("\r\n")[1:]}
    assert names <= {
        *("host", "accept", "accept-encoding", "connection", "user-agent"),
        *("content-type", "content-length", "authorization", wire.AGE_HEADER),
    }
    assert "very-secret-token" not in caplog.text
    assert "very-secret-token" not in repr(to._config)


@pytest.mark.promise("A16")
def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    to = started_sender("https://127.0.0.1:9")
    eventually("the thread", lambda: to._ready.is_set())
    client = to._client()
    context = client._transport._pool._ssl_context  # type: ignore[attr-defined]
    assert context.check_hostname
    assert context.verify_mode.name == "CERT_REQUIRED"
    to.close(1)


def sources() -> Iterator[tuple[str, ast.AST]]:
    (folder,) = foreshock.monitor.__path__
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.name, node


@pytest.mark.promise("A13")
def test_the_agent_calls_no_collective() -> None:
    asks = {"is_available", "is_initialized", "get_rank", "get_world_size"}
    classes = {"FSDPModule", "DTensor"}  # to be recognised
    reached, asked = 0, 0
    for name, node in sources():
        where = f"{name} line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"full_tensor", "redistribute", "unshard"}, f"{where} gathers a sharded tensor"
            reached += node.attr == "distributed"
            if isinstance(node.value, ast.Attribute) and node.value.attr == "distributed":
                assert node.attr in asks, f"{where} calls torch.distributed.{node.attr}"
                asked += 1
        if isinstance(node, ast.Import):
            assert not any("distributed" in a.name for a in node.names), f"{where} imports torch.distributed"
        if isinstance(node, ast.ImportFrom) and "distributed" in str(node.module):
            assert {a.name for a in node.names} <= classes, f"{where} imports from {node.module}"
    assert reached == asked, "torch.distributed is handed on under another name"


@pytest.mark.promise("A16")
def test_the_agent_opens_no_port() -> None:
    for name, node in sources():
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("listen", "bind", "create_server", "start_server"), f"{name} line {node.lineno}"
