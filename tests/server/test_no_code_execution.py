"""Received data is never executed or unpickled by any module of the service."""

import ast
from pathlib import Path

import pytest

import foreshock.contract.wire
import foreshock.server.app

PACKAGES = [Path(module.__file__ or "").parent for module in (foreshock.contract.wire, foreshock.server.app)]
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "yaml", "xml", "ctypes", "subprocess", "torch"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "fork", "load_module"}

pytestmark = pytest.mark.promise("S14")


OUTSIDE = {"child.py", "backup.py"}
"""Modules that start a service or run pg_dump in another process. The service does not import them."""


def sources() -> list[Path]:
    found = [p for package in PACKAGES for p in package.rglob("*.py") if p.name not in OUTSIDE]
    return [p for p in found if not {"ui", "testing"}.intersection(p.parts)]


def found_in(path: Path) -> set[str]:
    """Return the forbidden modules and calls that a module uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & BANNED_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & BANNED_MODULES
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            # The built-in `compile` makes executable code; `re.compile` and the compilation of queries do not.
            is_method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") != "builtins"
            found |= ({name} & BANNED_CALLS) - ({"compile"} if is_method else set())
            text_query = name in ("text", "exec_driver_sql") and node.args and isinstance(node.args[0], ast.JoinedStr)
            found |= {"SQL formatted from values"} if text_query else set()
    return found


def test_service_modules_never_execute_or_unpickle_data() -> None:
    assert len(sources()) > 30
    offences = {path.name: found_in(path) for path in sources()}
    offences["database.py"] -= {"SQL formatted from values"}  # PRAGMA takes no parameters; its values are constants
    assert {name: found for name, found in offences.items() if found} == {}
    for name in ("foreshock.server.testing", "foreshock.server.child", "store.backup", "store import backup"):
        assert [path.name for path in sources() if name in path.read_text("utf-8")] == []
