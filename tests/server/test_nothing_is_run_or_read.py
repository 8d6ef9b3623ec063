"""What arrives is data: it is never run, never unpickled, and never becomes a path."""

import ast
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import foreshock.contract.wire
import foreshock.server.app
from foreshock.server.testing import FakeRank, LiveService

ROOMS = [Path(module.__file__ or "").parent for module in (foreshock.contract.wire, foreshock.server.app)]
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "yaml", "xml", "ctypes", "subprocess", "torch"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "fork", "load_module"}

pytestmark = pytest.mark.promise("S14")


OUTSIDE = {"child.py", "backup.py"}
"""What starts a service from another process, and what the command line copies a store with: it calls pg_dump. The
service imports none of them."""


def sources() -> list[Path]:
    found = [p for room in ROOMS for p in room.rglob("*.py") if p.name not in OUTSIDE]
    return [p for p in found if not {"ui", "testing"}.intersection(p.parts)]


def found_in(path: Path) -> set[str]:
    """What a module imports or calls that it must not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & BANNED_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & BANNED_MODULES
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            # Python's own `compile` runs what it is given; a regular expression's and a query's only read it.
            is_method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") != "builtins"
            found |= ({name} & BANNED_CALLS) - ({"compile"} if is_method else set())
            text_query = name in ("text", "exec_driver_sql") and node.args and isinstance(node.args[0], ast.JoinedStr)
            found |= {"SQL put together from values"} if text_query else set()
    return found


def test_no_module_of_the_service_can_run_or_unpickle_what_it_was_sent() -> None:
    assert len(sources()) > 30
    offences = {path.name: found_in(path) for path in sources()}
    offences["database.py"] -= {"SQL put together from values"}  # PRAGMA takes no parameters; its values are constants
    assert {name: what for name, what in offences.items() if what} == {}
    for name in ("foreshock.server.testing", "foreshock.server.child", "store.backup", "store import backup"):
        assert [path.name for path in sources() if name in path.read_text("utf-8")] == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\nfrom yaml import load\neval('1')\nc.execute(text(f'SELECT {x}'))\nre.compile('a')\n")
    assert found_in(bad) == {"pickle", "yaml", "eval", "SQL put together from values"}
    for given in ("compile('1', '', 'eval')", "builtins.compile('1', '', 'eval')"):
        bad.write_text(given)
        assert found_in(bad) == {"compile"}


WAYS = [
    "/assets/../index.html",
    "/assets/../../app.py",
    "/assets/..%2f..%2fapp.py",
    "/assets/%2e%2e/%2e%2e/app.py",
    "/assets/%252e%252e/%252e%252e/app.py",
    "/assets/..\\..\\app.py",
    "/assets/..%5c..%5capp.py",
    "/assets/..;/..;/app.py",
    "/assets//etc/passwd",
    "/assets/%00",
    "/assets/index.html%00.js",
    "/../../../../etc/passwd",
    "//etc/passwd",
    "/v1/runs/../../../../etc/passwd",
    "/v1/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/runs/..%5c..%5cetc%5cpasswd/curves?line=run.loss",
    "/v1/runs/a;b%00c/matrix?metric=head.risk",
    "/v1/commands/..%2f..%2fetc%2fpasswd",
    "file:///etc/passwd",
    "http://127.0.0.1/../../etc/passwd",
]


def asked(url: str, target: str) -> tuple[int, bytes]:
    """The status and the rest of the answer to a request line sent as it stands."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        head = f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode("latin-1"))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer[9:12]), answer


def test_no_spelling_of_a_path_leads_to_a_file(live_service: LiveService) -> None:
    for target in WAYS:
        status, answer = asked(live_service.url, target)
        assert status in (400, 404, 422), target  # 422: a NUL in it
        assert b"root:" not in answer
        assert b"create_app" not in answer


async def test_a_run_named_like_a_path_is_a_row_and_no_file(service: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for name in ("../../escape", "/etc/passwd", "a/../../b", "....//c"):
        rank = FakeRank(run=name)
        await service.store(rank, rank.started(), rank.sample(1))
    assert sorted(tmp_path.rglob("*")) == before
    assert len((await service.get("/v1/runs"))["runs"]) == 4
