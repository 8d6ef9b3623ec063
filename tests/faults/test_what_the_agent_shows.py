"""What leaves the process and what an answer leaves behind: one header with the token, no port, cookie or redirect."""

import ast
import functools
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.hostile_server import HostileServer, acknowledge, answer, hostile_server, reply
from tests.faults.sending import CERTIFICATE, IN_ORDER_SECONDS, eventually, send, started_sender, steps_at, tls_of_hooks

import foreshock.monitor
from foreshock.contract import wire
from foreshock.monitor.transport.sender import SLOW_FAILURES


def with_new_cookies(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    batch = json.loads(body)
    number = len(server.batches)
    cookies = [f"Set-Cookie: c{number}-{i}={'v' * 3900}; Path=/" for i in range(5)]
    ack = {"boot": batch["boot"], "acknowledged": batch["sequence"], "commands": []}
    reply(connection, 200, json.dumps(ack).encode(), *cookies)


def arrived(server: HostileServer, step: int) -> bool:
    return steps_at(server)[-1:] == [step]


@pytest.mark.promise("A28")
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
@pytest.mark.promise("A28")
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
@pytest.mark.promise("A28")
def test_a_redirect_to_anything_is_an_answer_and_no_fault(location: str, quick_retries: None) -> None:
    with hostile_server(answer(302, f"Location: {location}")) as server:
        to = started_sender(server.url)
        send(to, 1)
        eventually("tries", lambda: to._failures >= SLOW_FAILURES + 4)
        to.close(IN_ORDER_SECONDS)
    assert (dict(to.faults), dict(to.dropped)) == ({}, {})


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
@pytest.mark.parametrize("trusted", [False, True])
def test_a_certificate_that_nobody_vouches_for_or_of_another_host_is_refused(
    trusted: bool, quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted:  # it is that of hooks.example.com
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with hostile_server(acknowledge, tls_of_hooks()) as server:
        to = started_sender(server.url.replace("http:", "https:"))
        send(to, 1)
        eventually("two tries", lambda: to._failures >= 2)
        to.close(1)
    assert server.batches == []


def sources() -> Iterator[tuple[str, ast.AST]]:
    (folder,) = foreshock.monitor.__path__
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.name, node


@pytest.mark.promise("A13")
@pytest.mark.promise("A16")
def test_the_agent_opens_no_port_and_calls_no_collective_but_for_qk_clip() -> None:
    asks = {"is_available", "is_initialized", "get_rank", "get_world_size"}
    classes = {"FSDPModule", "DTensor"}  # to be recognised
    of_qk_clip = {"all_reduce", "ReduceOp", "ProcessGroup", "group"}  # which is asked for by itself
    more = {"qk_clip.py": of_qk_clip}
    more |= {"checkpoints.py": {"distributed_c10d"}}  # the store of the processes, in which nobody waits for another
    reached, asked = 0, 0
    for name, node in sources():
        where = f"{name} line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"full_tensor", "redistribute", "unshard"}, f"{where} gathers a sharded tensor"
            assert node.attr not in {"listen", "bind", "create_server", "start_server"}, f"{where} opens a port"
            reached += node.attr == "distributed"
            if isinstance(node.value, ast.Attribute) and node.value.attr == "distributed":
                assert node.attr in asks | more.get(name, set()), f"{where} calls torch.distributed.{node.attr}"
                asked += 1
        if isinstance(node, ast.Import):
            assert not any("distributed" in a.name for a in node.names), f"{where} imports torch.distributed"
        if isinstance(node, ast.ImportFrom) and "distributed" in str(node.module):
            assert {a.name for a in node.names} <= classes, f"{where} imports from {node.module}"
    assert reached == asked, "torch.distributed is handed on under another name"
