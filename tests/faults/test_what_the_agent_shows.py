"""What leaves the process: one header with the token, no collective, no open port."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.hostile_server import (
    acknowledge,
    hostile_server,
)
from tests.faults.sending import CERTIFICATE, eventually, send, started_sender, tls_of_hooks

import foreshock.monitor
from foreshock.contract import wire


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
