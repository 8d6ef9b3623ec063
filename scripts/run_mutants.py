"""Changes the rules one replacement at a time, in a copy of the tree, and lists the changes that no test notices.

    .venv/bin/python -P scripts/run_mutants.py [WORD ...]

tests/mutants.toml has the changes and the tests that have to fail. Words choose the files whose path holds one of them.
The exit status is 1 if the tests notice fewer than 85 % of the changes, or if a change or its tests no longer fit.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import fastapi  # noqa: F401 - what tests import is imported once, before the processes are forked that run them
import pytest
import sqlalchemy  # noqa: F401
import torch  # noqa: F401

ROOT: Final = Path(__file__).parents[1]
_WANTED: Final = 0.85
_LOG: Final = "pytest.log"
_NOTICED: Final = int(pytest.ExitCode.TESTS_FAILED)
_HUNG: Final = -int(signal.SIGKILL)


def main(words: list[str]) -> int:
    """Run every change of the list against its tests."""
    files = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["file"]
    with tempfile.TemporaryDirectory() as folder:
        _copy_to(Path(folder))
        found = [_of_file(file) for file in files if not words or any(word in file["path"] for word in words)]
    noticed, survived, broken = (sum(each) for each in zip(*found, strict=True))
    print(f"{noticed} of {noticed + survived} changes were noticed, {noticed / max(noticed + survived, 1):.0%}")
    return int(broken > 0 or noticed < _WANTED * (noticed + survived))


def _copy_to(folder: Path) -> None:
    """Copy the files that git knows, and let this process and its children import and test the copy alone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    os.chdir(folder)
    sys.path.insert(0, str(folder / "src"))
    os.environ |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}


def _of_file(file: dict[str, list[list[str]]]) -> tuple[int, int, int]:
    """How many changes of a file were noticed, how many were not, and how many could not be tried."""
    path, tests = Path("src/foreshock", str(file["path"])), [f"tests/{name}" for name in file["tests"]]
    text, began = path.read_text(), time.monotonic()
    if _exit_code_of(tests, 600.0) != 0:
        print(Path(_LOG).read_text(), f"{path}: its tests fail without a change", sep="\n")
        return 0, 0, 1
    most_seconds = 30.0 + 5.0 * (time.monotonic() - began)
    noticed = survived = broken = 0
    for number, (old, new, *reasons) in enumerate(file["mutants"]):
        code = None
        if text.count(old) == 1:
            path.write_text(text.replace(old, new))
            os.utime(path, (number, number))  # another time than that of the compiled file
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


def _exit_code_of(tests: list[str], most_seconds: float) -> int | None:
    """What pytest returns for these tests, in a process of its own that is stopped after so many seconds."""
    process = get_context("fork").Process(target=_run, args=(tests,))
    process.start()
    process.join(most_seconds)
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode


def _run(tests: list[str]) -> None:
    os.setsid()
    log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that are imported already
    sys.exit(int(pytest.main(["-x", "-q", "-W", imported, "-p", "no:cacheprovider", *tests])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
