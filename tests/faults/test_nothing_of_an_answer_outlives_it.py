"""Cookies, redirects and refusals of the request's head: the next request is as the first was, and no batch is lost."""

import functools
import json
import logging
import socket

import pytest
from tests.faults.hostile_server import HostileServer, acknowledge, answer, hostile_server, reply
from tests.faults.sending import IN_ORDER_SECONDS, eventually, send, started_sender, steps_at

from foreshock.monitor.transport.sender import SLOW_FAILURES

pytestmark = pytest.mark.promise("A28")


def with_new_cookies(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    batch = json.loads(body)
    number = len(server.batches)
    cookies = [f"Set-Cookie: c{number}-{i}={'v' * 3900}; Path=/" for i in range(5)]
    ack = {"boot": batch["boot"], "acknowledged": batch["sequence"], "commands": []}
    reply(connection, 200, json.dumps(ack).encode(), *cookies)


def arrived(server: HostileServer, step: int) -> bool:
    return steps_at(server)[-1:] == [step]


def test_the_head_of_the_hundredth_request_is_as_long_as_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """And the training's log holds no line for a request, though the root logger passes all of INFO."""
    caplog.set_level(logging.INFO)
    with hostile_server(with_new_cookies) as server:
        to = started_sender(server.url)
        for step in range(1, 101):
            send(to, step)
            eventually("its batch", functools.partial(arrived, server, step))
        to.close(IN_ORDER_SECONDS)
    sizes = [len(head) for head in server.headers]
    assert len(sizes) >= 100
    assert max(sizes) - min(sizes) <= 4  # digits of the batch's length and of the process's age
    assert not any("cookie" in head.lower() for head in server.headers)
    assert [record.getMessage() for record in caplog.records if not record.name.startswith("foreshock")] == []


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"Invalid HTTP request received."),
        (400, b"<html><title>400 Request Header Or Cookie Too Large</title></html>"),
        (400, b'{"message": "Request header fields too large"}'),
        (400, b""),
        (431, b"{}"),
    ],
)
def test_a_refusal_of_the_head_loses_no_batch(status: int, body: bytes, quick_retries: None) -> None:
    with hostile_server(answer(status, body=body)) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("tries", lambda: len(server.batches) >= 3)
        server.behaviour = acknowledge
        eventually("it is stored", lambda: not len(to._own))
        to.close(IN_ORDER_SECONDS)
    assert (steps_at(server), dict(to.dropped)) == ([1], {})


@pytest.mark.parametrize("location", ["data:,x", "http://a..b/", "http://xn--a/", "http://[", "\t", "http://a:99999/"])
def test_a_redirect_to_anything_is_an_answer_and_no_fault(location: str, quick_retries: None) -> None:
    with hostile_server(answer(302, f"Location: {location}")) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("tries", lambda: to._failures >= SLOW_FAILURES + 4)
        to.close(IN_ORDER_SECONDS)
    assert (dict(to.faults), dict(to.dropped)) == ({}, {})
