"""What is asked again, how soon, what is never asked again, and what a person reads about a service that is away."""

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
def test_408_429_and_every_5xx_are_asked_again_after_one_second_to_sixty_spread_out() -> None:
    assert [s for s in range(100, 700) if is_retryable(s)] == [408, 429, *range(500, 600)]
    before = random.getstate()
    for unit in (0.0, 0.5, 1.0):
        delays = [retry_delay(n, None, unit) for n in range(1, 2000)]
        assert all(1 <= delay <= 60 for delay in delays)
        assert delays[:10] == sorted(delays[:10])
    assert retry_delay(20, None, 0.0) < retry_delay(20, None, 1.0)
    assert len({retry_delay(1, "20") for _ in range(100)}) > 90, "clients released together part ways"
    assert random.getstate() == before, "the generator that shuffles the training data is not touched"


@pytest.mark.promise("A3")
@pytest.mark.parametrize("header", ["30", "1e9", "-5", "0", "nan", "inf", "soon", "", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_retry_after_lengthens_the_wait_within_bounds_and_is_ignored_when_senseless(header: str) -> None:
    longer = {"30": 33.75, "1e9": 60.0}
    assert retry_delay(1, header, 0.5) == longer.get(header, retry_delay(1, None, 0.5))


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
        assert server.sequences() == [1, 2]


@pytest.mark.promise("A3")
@pytest.mark.parametrize("status", [301, 307, 308, 401, 403, 404, 409, 415, 408, 429, 500, 503])
def test_what_may_pass_or_somebody_can_mend_loses_nothing_and_the_latter_is_said_once(
    status: int, quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(answer(status, "Location: http://127.0.0.1:1/", "Retry-After: 0")) as server:
        to = started_sender(server.url)
        send(to, 1)
        to.put(SWITCHED)
        eventually("tries", lambda: len(server.batches) >= 4)
        server.behaviour = acknowledge  # the token is back
        eventually("it is stored", lambda: not len(to._own))
        to.close(2)
    assert to.dropped == {}
    assert server.events("switched")
    assert sum(f"answers {status}" in record.message for record in caplog.records) == (not is_retryable(status))


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


@pytest.mark.promise("A3")
@pytest.mark.parametrize("closing", [False, True])
def test_a_token_that_is_renewed_after_its_refusal_is_tried_within_seconds_and_at_the_close(
    closing: bool, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("of-yesterday\n")

    def only_the_new_one(server: HostileServer, connection: socket.socket, body: bytes) -> None:
        is_new = "Bearer of-today" in server.headers[-1]
        acknowledge(server, connection, body) if is_new else reply(connection, 401, b"{}")

    with hostile_server(only_the_new_one) as server:
        to = started_sender(server.url, token_file=file)
        send(to, 1)
        eventually("the refusal", lambda: to._logged_status == 401)
        file.write_text("")  # in the middle of being written
        file.write_text("of-today\n")
        if not closing:
            eventually("the new token", lambda: not len(to._own), 10.0)
        to.close(IN_ORDER_SECONDS)
    assert (steps_at(server), len(to._own), dict(to.dropped)) == ([1], 0, {})
    assert len(server.batches) == 2
    with pytest.raises(ValidationError, match=r"missing cannot be read: FileNotFoundError"):
        AgentConfig(token_file=tmp_path / "missing")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_service_that_nobody_reaches_is_told_once_however_often_it_is_tried(
    tmp_path: Path, quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    url = closed_port()
    to = started_sender(url, tmp_path)
    send(to, 1)
    eventually("many tries", lambda: to._failures >= 6)
    assert [line for line in said(caplog) if f"no service answers at {url}" in line] == said(caplog)
    assert len(said(caplog)) == 1
    assert "training continues" in said(caplog)[0]
    to.close(IN_ORDER_SECONDS)
    assert f"not sent yet: 1 batch in {tmp_path}" in said(caplog)[-1]


def test_what_is_lost_without_a_spool_is_told_at_the_end_with_what_kept_the_last_try_from_it(
    quick_retries: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nope/ca.pem")
    to = started_sender("https://service.example")
    send(to, 1, 2)
    eventually("a try", lambda: to._failures)
    to.dropped["queue_full"] += 3
    to.close(IN_ORDER_SECONDS)
    assert any(
        "no spool is set" in line and "SSL_CERT_FILE=/nope/ca.pem cannot be used" in line for line in said(caplog)
    )
    assert "foreshock: events that were never sent: 3 (queue_full)" in said(caplog)


def test_a_service_that_is_back_is_told_and_one_that_comes_and_goes_is_not_told_again(
    quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(hang) as server:
        to = started_sender(server.url, request_seconds=0.2)
        send(to, 1)
        eventually("the log says so", lambda: any("no service answers" in line for line in said(caplog)))
        server.behaviour = acknowledge
        eventually("the log says that it is back", lambda: any("answers again" in line for line in said(caplog)))
        server.behaviour = hang
        before = to._failures
        send(to, 2)
        eventually("tries", lambda: to._failures >= before + 4)
        server.behaviour = acknowledge
        eventually("all is stored", lambda: not len(to._own))
        to.close(IN_ORDER_SECONDS)
    assert [line.partition(" at ")[0] for line in said(caplog)] == [
        "foreshock: no service answers", "foreshock: the service"
    ]  # fmt: skip


def test_one_try_that_fails_a_second_process_and_a_training_that_sends_everything_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = outage.Outage("http://here", warns=True), outage.Outage("http://here", warns=False)
    for each, failures in ((first, 1), (second, 9)):
        for _ in range(failures):
            each.failed(TimeoutError())
        each.answered()
    with hostile_server(acknowledge) as server:
        to = started_sender(server.url, tmp_path)
        send(to, 1, 2, 3)
        to.close(IN_ORDER_SECONDS)
    assert said(caplog) == []
