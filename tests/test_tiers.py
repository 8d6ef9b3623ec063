"""Every test is run by continuous integration exactly once, and a run says what it left out and how to go on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.loading import module_at

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest

def test_quick():
    pass

@pytest.mark.full
def test_long():
    pass

@pytest.mark.parametrize("n", range(7))
def test_that_fails(n):
    assert n == 3
"""


def recipe(target: str) -> str:
    """The lines of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    return found.group(1)


def test_every_file_that_runs_alone_exists() -> None:
    for path in module_at(ROOT / "tests" / "conftest.py").ALONE:
        assert (ROOT / path).exists(), f"{path} is gone; name where it went in ALONE of tests/conftest.py"


def test_continuous_integration_runs_every_test_once() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make check", "make test", "make test-full"]
    assert re.findall(r'-m "?([a-z ]+?)"? \$', recipe("test").replace(" -m pytest", "")) == ["not alone", "alone"]
    assert re.findall(r'-m "([a-z ]+)"', recipe("test-full")) == ["full and not alone", "full and alone"]
    assert "--tier" not in recipe("test")
    assert recipe("test-full").count("--tier full") == 2


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A project with the tiers of this one and a few tests of its own."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_few.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  full: long\n  alone: by itself\n")
    return tmp_path


def run(suite: Path, *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=suite, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.full
def test_a_quick_run_says_what_it_left_out_and_a_failed_one_how_to_run_that_again(suite: Path) -> None:
    said = run(suite)
    assert "6 failed, 2 passed, 1 deselected" in said
    assert "tests marked `full` were left out (--tier quick); `make test-full` runs them" in said
    assert "to run what failed by itself (and 1 more)" in said
    assert "-vv --tier quick 'tests/test_few.py::test_that_fails[0]' 'tests/test_few.py::test_that_fails[1]'" in said


@pytest.mark.full
def test_the_full_tier_holds_what_the_quick_one_leaves_out(suite: Path) -> None:
    said = run(suite, "--tier", "full", "-m", "full")
    assert "1 passed, 8 deselected" in said
    assert "left out" not in said
