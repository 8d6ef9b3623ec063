"""Mutation testing: apply changes to the code one by one, in a copy of the tree, and list those that no test detects.

    .venv/bin/python -P scripts/run_mutants.py [WORD ...]

tests/mutants.toml lists the changes and the tests that have to fail. WORDs select files by a part of their path.
For each change, the fastest tests that execute its lines run first, and all tests of the file only if those pass. The
exit status is 1 if the tests detect fewer than 85 % of the changes, or if an entry no longer matches the code.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import fastapi  # noqa: F401 - import what tests need once, before the test processes are forked
import pytest
import sqlalchemy  # noqa: F401
import torch  # noqa: F401

ROOT: Final = Path(__file__).parents[1]
_WANTED: Final = 0.85
_LOG: Final = "pytest.log"
_SEEN: Final = "seen.json"
_MOST_FIRST: Final = 30
"""Most tests that run before all tests of a file."""
_NOTICED: Final = int(pytest.ExitCode.TESTS_FAILED)
_HUNG: Final = -int(signal.SIGKILL)


def main(words: list[str]) -> int:
    """Test every change in the list, and return the exit status."""
    files = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["file"]
    with tempfile.TemporaryDirectory() as folder:
        _copy_to(Path(folder))
        found = [_of_file(file) for file in files if not words or any(word in file["path"] for word in words)]
    noticed, survived, broken = (sum(each) for each in zip(*found, strict=True))
    print(f"{noticed} of {noticed + survived} changes were noticed, {noticed / max(noticed + survived, 1):.0%}")
    return int(broken > 0 or noticed < _WANTED * (noticed + survived))


def _copy_to(folder: Path) -> None:
    """Copy the files tracked by git, and make this process and its children import and test only the copy."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    os.chdir(folder)
    sys.path.insert(0, str(folder / "src"))
    os.environ |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}


def _of_file(file: dict[str, list[list[str]]]) -> tuple[int, int, int]:
    """Return how many changes of a file were detected, how many survived, and how many could not be tested."""
    path, tests = Path("src/foreshock", str(file["path"])), [f"tests/{name}" for name in file["tests"]]
    text, began = path.read_text(), time.monotonic()
    seen = _Seen([], [])
    if _exit_code_of(tests, 600.0, path) == 0:
        seen = _Seen(*json.loads(Path(_SEEN).read_text()))
        seen.import_modules()
    elif _exit_code_of(tests, 600.0) != 0:  # tracing may have exceeded the time limit
        print(Path(_LOG).read_text(), f"{path}: its tests fail without a change", sep="\n")
        return 0, 0, 1
    most_seconds = 30.0 + 5.0 * (time.monotonic() - began)
    noticed = survived = broken = 0
    sound: dict[tuple[str, ...], bool] = {}
    for number, (old, new, *reasons) in enumerate(file["mutants"]):
        code = None
        if text.count(old) == 1:
            first = tuple(seen.tests_of(text[: text.index(old)].count("\n") + 1, old.count("\n") + 1))
            if first not in sound:  # these tests may depend on others
                path.write_text(text)
                sound[first] = bool(first) and _exit_code_of([*first], most_seconds) == 0
            path.write_text(text.replace(old, new))
            os.utime(path, (number, number))  # so that Python does not use the stale compiled file
            code = _exit_code_of([*first], most_seconds) if sound[first] else None
            if code not in (_NOTICED, _HUNG):
                code = _exit_code_of(tests, most_seconds)
        noticed += code in (_NOTICED, _HUNG)
        survived += code == 0 and not reasons
        broken += code not in (0, _NOTICED, _HUNG)
        if code not in (_NOTICED, _HUNG):
            what = "cannot be tried" if code != 0 else " ".join(["survived", *reasons])
            print(f"{path}: {what}: {old!r} -> {new!r}", flush=True)
    path.write_text(text)
    print(f"{path}: {noticed} noticed, {survived} not, in {time.monotonic() - began:.0f} s", flush=True)
    return noticed, survived, broken


class _Seen(NamedTuple):
    """Observations from running the tests without a change."""

    tests: list[tuple[float, str, list[int]]]
    """seconds, test, and the lines of the file that the test executed"""
    modules: list[str]
    """modules of other projects that the tests import"""

    def tests_of(self, line: int, lines: int) -> list[str]:
        """Return tests that executed any of `lines` lines from `line`, the fastest first."""
        wanted = set(range(line, line + lines))
        return [test for _, test, ran in sorted(self.tests) if not wanted.isdisjoint(ran)][:_MOST_FIRST]

    def import_modules(self) -> None:
        """Import the modules once, before the test processes are forked."""
        for module in self.modules:
            with suppress(Exception):  # some submodules can only be imported by their own package
                importlib.import_module(module)


class _Watcher:
    """A pytest plugin that records the fields of `_Seen` for the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = str(path.resolve()), set[int]()
        self._tests: list[tuple[float, str, list[int]]] = []
        threading.settrace(self._called)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._ran if frame.f_code.co_filename == self._path else None

    def _ran(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._lines.add(frame.f_lineno)
        return self._ran

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, self._lines = time.monotonic(), set()
        sys.settrace(self._called)
        done = yield
        sys.settrace(None)
        self._tests.append((time.monotonic() - began, item.nodeid, sorted(self._lines)))
        return done

    def pytest_sessionfinish(self) -> None:
        here = os.getcwd()
        places = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        modules = [name for name, place in places.items() if place and not place.startswith(here)]
        Path(here, _SEEN).write_text(json.dumps([self._tests, modules]))


def _exit_code_of(tests: list[str], most_seconds: float, watched: Path | None = None) -> int | None:
    """Run these tests in a child process that is killed after `most_seconds`, and return the exit status of pytest."""
    process = get_context("fork").Process(target=_run, args=(tests, watched))
    process.start()
    process.join(most_seconds)
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode


def _run(tests: list[str], watched: Path | None) -> None:
    os.setsid()
    log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # for plugins that are already imported
    plugins = [] if watched is None else [_Watcher(watched)]
    sys.exit(int(pytest.main(["-x", "-q", "-W", imported, "-p", "no:cacheprovider", *tests], plugins)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
