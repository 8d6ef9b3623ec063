"""What a person reads about a service that does not answer: once, and at the end what became of the events."""

from pathlib import Path

import pytest
from tests.faults.hostile_server import acknowledge, closed_port, hang, hostile_server
from tests.faults.sending import IN_ORDER_SECONDS, eventually, send, started_sender

from foreshock.monitor.transport import outage


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
        "no spool is set: " in line and "SSL_CERT_FILE=/nope/ca.pem cannot be used" in line for line in said(caplog)
    )
    assert "foreshock: events that were never sent: 3 (queue_full)" in said(caplog)


def test_a_service_that_is_back_is_told_and_one_that_comes_and_goes_is_not_told_again(
    quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(hang) as server:
        to = started_sender(server.url, request_seconds=0.2)
        send(to, 1)
        eventually("it is told", lambda: any("no service answers" in line for line in said(caplog)))
        server.behaviour = acknowledge
        eventually("it is told to be back", lambda: any("answers again" in line for line in said(caplog)))
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
