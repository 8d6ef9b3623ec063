"""Retries and back-off by status, rejected batches, and log messages about an unreachable service."""

import random
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tests.faults.hostile_server import (
    HostileServer,
    acknowledge,
    answer,
    closed_port,
    hang,
    hostile_server,
    reply,
)
from tests.faults.sending import (
    BUSY_SECONDS,
    IN_ORDER_SECONDS,
    SWITCHED,
    eventually,
    sample,
    send,
    started_sender,
    steps_at,
)

from foreshock.contract import wire
from foreshock.monitor import AgentConfig
from foreshock.monitor.transport import outage, sender
from foreshock.monitor.transport.posting import is_retryable, retry_delay


@pytest.mark.promise("A3")
def test_408_429_and_5xx_are_retried_after_1_to_60_seconds_with_jitter() -> None:
    assert [s for s in range(100, 700) if is_retryable(s)] == [408, 429, *range(500, 600)]
    before = random.getstate()
    for unit in (0.0, 0.5, 1.0):
        delays = [retry_delay(n, None, unit) for n in range(1, 2000)]
        assert all(1 <= delay <= 60 for delay in delays)
        assert delays[:10] == sorted(delays[:10])
    assert retry_delay(20, None, 0.0) < retry_delay(20, None, 1.0)
    assert len({retry_delay(1, "20") for _ in range(100)}) > 90, "clients with the same Retry-After must spread out"
    assert random.getstate() == before, "the global random generator, which shuffles training data, must not be used"


@pytest.mark.promise("A3")
@pytest.mark.parametrize("header", ["30", "1e9", "-5", "0", "nan", "inf", "soon", "", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_retry_after_is_capped_and_ignored_if_invalid(header: str) -> None:
    longer = {"30": 33.75, "1e9": 60.0}
    assert retry_delay(1, header, 0.5) == longer.get(header, retry_delay(1, None, 0.5))


@pytest.mark.promise("A3")
@pytest.mark.parametrize("status", [400, 413, 422])
def test_rejected_batch_is_counted_and_not_retried(status: int) -> None:
    with hostile_server(answer(status, "Location: http://127.0.0.1:1/")) as server:
        agent_sender = started_sender(server.url)
        send(agent_sender, 1)
        eventually("the rejection", lambda: agent_sender.dropped)
        server.behaviour = acknowledge
        send(agent_sender, 2)
        eventually("the next batch", lambda: 2 in steps_at(server))
        agent_sender.close(2)
        assert agent_sender.dropped == {f"refused_{status}": 1}
        assert server.sequences() == [1, 2]


@pytest.mark.promise("A3")
@pytest.mark.parametrize("status", [301, 307, 308, 401, 403, 404, 409, 415, 408, 429, 500, 503])
def test_recoverable_errors_lose_nothing_and_non_transient_ones_are_logged_once(
    status: int, quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(answer(status, "Location: http://127.0.0.1:1/", "Retry-After: 0")) as server:
        agent_sender = started_sender(server.url)
        send(agent_sender, 1)
        agent_sender.put(SWITCHED)
        eventually("tries", lambda: len(server.batches) >= 4)
        server.behaviour = acknowledge  # the service recovers
        eventually("the batch is stored", lambda: not len(agent_sender._own))
        agent_sender.close(2)
    assert agent_sender.dropped == {}
    assert server.events("switched")
    assert sum(f"answers {status}" in record.message for record in caplog.records) == (not is_retryable(status))


@pytest.mark.promise("A3")
def test_401_is_not_retried_immediately_and_the_next_start_sends_the_batch(tmp_path: Path) -> None:
    with hostile_server(answer(401)) as server:
        agent_sender = started_sender(server.url, tmp_path, boot="boot-1")
        agent_sender.put(SWITCHED)
        eventually("the first try", lambda: server.batches)
        time.sleep(1.5)
        assert len(server.batches) == 1
        agent_sender.close(IN_ORDER_SECONDS)
        server.behaviour = acknowledge
        again = started_sender(server.url, tmp_path, boot="boot-2")
        eventually("the event of the first boot", lambda: server.sequences("boot-1") == [1, 1])
        again.close(2)
    assert (agent_sender.dropped, again.dropped) == ({}, {})


@pytest.mark.promise("A3")
def test_body_rejected_with_413_loses_its_samples_but_not_other_events() -> None:
    def reject_large(server: HostileServer, connection: socket.socket, body: bytes) -> None:
        reply(connection, 413, b"{}") if len(body) > 2000 else acknowledge(server, connection, body)

    with hostile_server(reject_large) as server:
        agent_sender = started_sender(server.url)
        large = sample(1).model_copy(update={"states": wire.Array.of(np.zeros((300, 16)))})
        agent_sender.put(large)
        agent_sender.put(SWITCHED)
        eventually(
            "the other event", lambda: any([e["kind"] for e in b["events"]] == ["switched"] for b in server.batches)
        )
        agent_sender.put(large)
        eventually("the samples are dropped", lambda: agent_sender.dropped["refused_413"] == 2)
        send(agent_sender, 3)
        eventually("the batch after it", lambda: 3 in steps_at(server))
        agent_sender.close(2)
    assert agent_sender.dropped == {"refused_413": 2}


@pytest.mark.promise("A3")
def test_other_events_rejected_with_413_are_dropped_after_a_limited_number_of_tries(
    quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_TRIES_TOO_LARGE", 5)
    with hostile_server(answer(413)) as server:
        agent_sender = started_sender(server.url)
        agent_sender.put(SWITCHED)
        eventually("the event is dropped", lambda: agent_sender.dropped)
        agent_sender.close(2)
    assert (agent_sender.dropped, len(server.batches)) == ({"refused_413": 1}, 5)


@pytest.mark.promise("A3")
def test_unpatched_sender_waits_a_second_before_retrying() -> None:
    with hostile_server(answer(503)) as server:
        agent_sender = started_sender(server.url)
        send(agent_sender, 1)
        eventually("two tries", lambda: len(server.requests_at) >= 2)
        assert server.requests_at[1] - server.requests_at[0] >= 0.95
        started = time.monotonic()
        agent_sender.close(2)
        assert time.monotonic() - started < 2 + BUSY_SECONDS


@pytest.mark.promise("A3")
@pytest.mark.parametrize("closing", [False, True])
def test_renewed_token_file_is_used_within_seconds_and_at_close(closing: bool, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-yesterday\n")

    def accept_new_token(server: HostileServer, connection: socket.socket, body: bytes) -> None:
        is_new = "Bearer of-today" in server.headers[-1]
        acknowledge(server, connection, body) if is_new else reply(connection, 401, b"{}")

    with hostile_server(accept_new_token) as server:
        agent_sender = started_sender(server.url, token_file=file)
        send(agent_sender, 1)
        eventually("the refusal", lambda: agent_sender._logged_status == 401)
        file.write_text("")  # an incomplete write
        file.write_text("of-today\n")
        if not closing:
            eventually("the new token", lambda: not len(agent_sender._own), 10.0)
        agent_sender.close(IN_ORDER_SECONDS)
    assert (steps_at(server), len(agent_sender._own), dict(agent_sender.dropped)) == ([1], 0, {})
    assert len(server.batches) == 2
    with pytest.raises(ValidationError, match=r"missing cannot be read: FileNotFoundError"):
        AgentConfig(token_file=tmp_path / "missing")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_unreachable_service_is_logged_once_across_retries(
    tmp_path: Path, quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    url = closed_port()
    agent_sender = started_sender(url, tmp_path)
    send(agent_sender, 1)
    eventually("many tries", lambda: agent_sender._failures >= 6)
    assert [line for line in logged(caplog) if f"no service answers at {url}" in line] == logged(caplog)
    assert len(logged(caplog)) == 1
    assert "training continues" in logged(caplog)[0]
    agent_sender.close(IN_ORDER_SECONDS)
    assert f"not sent yet: 1 batch in {tmp_path}" in logged(caplog)[-1]


def test_close_without_a_spool_logs_the_losses_and_the_last_error(
    quick_retries: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nope/ca.pem")
    agent_sender = started_sender("https://service.example")
    send(agent_sender, 1, 2)
    eventually("a try", lambda: agent_sender._failures)
    agent_sender.dropped["queue_full"] += 3
    agent_sender.close(IN_ORDER_SECONDS)
    assert any(
        "no spool is set" in line and "SSL_CERT_FILE=/nope/ca.pem cannot be used" in line for line in logged(caplog)
    )
    assert "foreshock: events that were never sent: 3 (queue_full)" in logged(caplog)


def test_recovery_is_logged_once_and_repeated_outages_are_not(
    quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(hang) as server:
        agent_sender = started_sender(server.url, request_seconds=0.2)
        send(agent_sender, 1)
        eventually("the outage is logged", lambda: any("no service answers" in line for line in logged(caplog)))
        server.behaviour = acknowledge
        eventually("the recovery is logged", lambda: any("answers again" in line for line in logged(caplog)))
        server.behaviour = hang
        before = agent_sender._failures
        send(agent_sender, 2)
        eventually("tries", lambda: agent_sender._failures >= before + 4)
        server.behaviour = acknowledge
        eventually("everything is stored", lambda: not len(agent_sender._own))
        agent_sender.close(IN_ORDER_SECONDS)
    assert [line.partition(" at ")[0] for line in logged(caplog)] == [
        "foreshock: no service answers", "foreshock: the service"
    ]  # fmt: skip


def test_single_failure_second_process_and_successful_run_log_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = outage.Outage("http://here", warns=True), outage.Outage("http://here", warns=False)
    for tracker, failures in ((first, 1), (second, 9)):
        for _ in range(failures):
            tracker.failed(TimeoutError())
        tracker.answered()
    with hostile_server(acknowledge) as server:
        agent_sender = started_sender(server.url, tmp_path)
        send(agent_sender, 1, 2, 3)
        agent_sender.close(IN_ORDER_SECONDS)
    assert logged(caplog) == []
