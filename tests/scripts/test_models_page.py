"""docs/models.md says what the recorded tests say, and every test with an `execution` mark is in the record."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from tests.loading import module_at

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """scripts/models_page.py."""
    return module_at(ROOT / "scripts" / "models_page.py")


def test_the_table_of_models_is_what_the_record_says(page: ModuleType) -> None:
    assert page.main(["--check"]) == 0


def test_every_recorded_test_still_exists(page: ModuleType) -> None:
    results = json.loads(page.RESULTS.read_text())
    gone = [test for run in results.values() for test in run["tests"] if not page.exists(test)]
    assert not gone, "run the tests marked execution with --record, and scripts/models_page.py"


def test_every_test_of_this_session_that_bears_the_mark_is_recorded(
    page: ModuleType, request: pytest.FixtureRequest
) -> None:
    recorded = {
        (test, tuple(pair))
        for run in json.loads(page.RESULTS.read_text()).values()
        for test, pairs in run["tests"].items()
        for pair in pairs
    }
    marked = {
        (item.nodeid, tuple(mark.args))
        for item in request.session.items
        if not any(skip.args[0] for skip in item.iter_markers("skipif"))  # what this machine can run
        for mark in item.iter_markers("execution")
    }
    missing = sorted(marked - recorded)
    assert not missing, "run the tests marked execution with --record, and scripts/models_page.py"


def test_a_test_that_failed_or_is_gone_leaves_the_record(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path / "models.json")

    def record(second: str) -> Path:
        names = {
            "test_every_recorded_test_still_exists": "passed",
            "test_the_table_of_models_is_what_the_record_says": second,
        }
        tests = [
            {
                "test": f"tests/scripts/test_models_page.py::{name}",
                "execution": [["GPT-2", "eager"]],
                "outcome": outcome,
            }
            for name, outcome in {**names, "test_that_is_gone": "passed"}.items()
        ]
        path = tmp_path / "record.json"
        path.write_text(
            json.dumps({"command": "pytest", "date": "2026-01-01", "machine": {"gpu": "one"}, "tests": tests})
        )
        return path

    page.take_in([record("passed")])
    assert len(json.loads(page.RESULTS.read_text())["GPU"]["tests"]) == 2
    assert "| 2 GPU |" in page.page()
    page.take_in([record("failed")])
    assert list(json.loads(page.RESULTS.read_text())["GPU"]["tests"]) == [
        "tests/scripts/test_models_page.py::test_every_recorded_test_still_exists"
    ]
