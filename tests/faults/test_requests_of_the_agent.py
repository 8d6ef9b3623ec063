"""Requests of the agent: the token only in one header, no cookies, no redirects, no open port."""

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


def set_new_cookies(server: HostileServer, connection: socket.socket, body: bytes) -> None:
    batch = json.loads(body)
    number = len(server.batches)
    cookies = [f"Set-Cookie: c{number}-{i}={'v' * 3900}; Path=/" for i in range(5)]
    ack = {"boot": batch["boot"], "acknowledged": batch["sequence"], "commands": []}
    reply(connection, 200, json.dumps(ack).encode(), *cookies)


def arrived(server: HostileServer, step: int) -> bool:
    return steps_at(server)[-1:] == [step]


@pytest.mark.promise("A28")
def test_request_headers_do_not_grow_and_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log has no line per request, although the root logger accepts INFO."""
    caplog.set_level(logging.INFO)
    with hostile_server(set_new_cookies) as server:
        sender = started_sender(server.url)
        for step in range(1, 101):
            send(sender, step)
            eventually("its batch", functools.partial(arrived, server, step))
        sender.close(IN_ORDER_SECONDS)
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
def test_rejected_request_headers_lose_no_batch(status: int, body: bytes, quick_retries: None) -> None:
    with hostile_server(answer(status, body=body)) as server:
        sender = started_sender(server.url)
        send(sender, 1)
        eventually("tries", lambda: len(server.batches) >= 3)
        server.behaviour = acknowledge
        eventually("the batch is stored", lambda: not len(sender._own))
        sender.close(IN_ORDER_SECONDS)
    assert (steps_at(server), dict(sender.dropped)) == ([1], {})


@pytest.mark.parametrize("location", ["data:,x", "http://a..b/", "http://xn--a/", "http://[", "\t", "http://a:99999/"])
@pytest.mark.promise("A28")
def test_redirects_are_not_followed_and_cause_no_fault(location: str, quick_retries: None) -> None:
    with hostile_server(answer(302, f"Location: {location}")) as server:
        sender = started_sender(server.url)
        send(sender, 1)
        eventually("tries", lambda: sender._failures >= SLOW_FAILURES + 4)
        sender.close(IN_ORDER_SECONDS)
    assert (dict(sender.faults), dict(sender.dropped)) == ({}, {})


@pytest.mark.promise("A16")
def test_token_is_only_in_the_authorization_header_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), hostile_server(acknowledge) as server:
        sender = started_sender(server.url, token="very-secret-token")
        send(sender, 1)
        eventually("a batch", lambda: server.batches)
        sender.close(2)
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
    assert "very-secret-token" not in repr(sender._config)


@pytest.mark.promise("A16")
@pytest.mark.parametrize("trusted", [False, True])
def test_untrusted_or_wrong_host_certificate_is_rejected(
    trusted: bool, quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted:  # trusted, but for hooks.example.com
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    with hostile_server(acknowledge, tls_of_hooks()) as server:
        sender = started_sender(server.url.replace("http:", "https:"))
        send(sender, 1)
        eventually("two tries", lambda: sender._failures >= 2)
        sender.close(1)
    assert server.batches == []


def sources() -> Iterator[tuple[str, ast.AST]]:
    (folder,) = foreshock.monitor.__path__
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.name, node


@pytest.mark.promise("A13")
@pytest.mark.promise("A16")
def test_agent_opens_no_port_and_calls_no_collective_except_for_qk_clip() -> None:
    queries = {"is_available", "is_initialized", "get_rank", "get_world_size"}
    classes = {"FSDPModule", "DTensor"}  # only for isinstance checks
    qk_clip_names = {"all_reduce", "ReduceOp", "ProcessGroup", "group"}  # QK-Clip is off by default
    allowed_by_file = {"qk_clip.py": qk_clip_names}
    allowed_by_file |= {"checkpoints.py": {"distributed_c10d"}}  # the key-value store, which does not block
    references, checked = 0, 0
    for name, node in sources():
        place = f"{name} line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"full_tensor", "redistribute", "unshard"}, f"{place} gathers a sharded tensor"
            assert node.attr not in {"listen", "bind", "create_server", "start_server"}, f"{place} opens a port"
            references += node.attr == "distributed"
            if isinstance(node.value, ast.Attribute) and node.value.attr == "distributed":
                assert node.attr in queries | allowed_by_file.get(name, set()), (
                    f"{place} calls torch.distributed.{node.attr}"
                )
                checked += 1
        if isinstance(node, ast.Import):
            assert not any("distributed" in a.name for a in node.names), f"{place} imports torch.distributed"
        if isinstance(node, ast.ImportFrom) and "distributed" in str(node.module):
            assert {a.name for a in node.names} <= classes, f"{place} imports from {node.module}"
    assert references == checked, "torch.distributed is used under another name"
