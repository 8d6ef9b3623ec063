"""Every promise has a test, and docs/reliability.md says what the tests last measured."""

import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.loading import module_at

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """scripts/reliability_page.py."""
    return module_at(ROOT / "scripts" / "reliability_page.py")


def promised() -> dict[str, str]:
    parts = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    return {promise: sentence for part in parts.values() for promise, sentence in part.items()}


def marked() -> set[str]:
    return {
        promise
        for path in (ROOT / "tests").rglob("test_*.py")
        for promise in re.findall(r"mark\.promise\(\"(\w+)\"\)", path.read_text())
    }


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    assert marked() == set(promised())
    assert {promise[0] for promise in promised()} == {"A", "S", "K"}
    assert [f"A{n}" for n in range(1, 17)] == [p for p in promised() if p.startswith("A")]
    assert [f"S{n}" for n in range(1, 18)] == [p for p in promised() if p.startswith("S")]
    assert [f"K{n}" for n in range(1, 13)] == [p for p in promised() if p.startswith("K")]


def test_the_page_is_what_the_record_says(page: ModuleType) -> None:
    assert page.main(["--check"]) == 0


def test_every_test_on_the_page_exists_and_passed_or_says_why_it_did_not_run(page: ModuleType) -> None:
    results: dict[str, dict[str, Any]] = json.loads(page.RESULTS.read_text())
    for test, tiers in results.items():
        assert page.exists(test), f"{test} is gone; run the suite with --record and scripts/reliability_page.py"
        for tier, entry in tiers.items():
            assert entry["outcome"] == "passed" or (entry["outcome"] == "skipped" and entry["reason"]), (test, tier)
    entries = [entry for tiers in results.values() for entry in tiers.values()]
    proven = {promise for entry in entries if entry["outcome"] == "passed" for promise in entry["promise"]}
    assert {promise for promise in promised() if not promise.startswith("K")} <= proven  # K: some need a GPU


def test_parts_of_a_long_run_add_up_and_the_worst_outcome_stays(page: ModuleType) -> None:
    one = {"outcome": "passed", "reason": "", "seconds": 1.0, "figures": {"kills": 100, "lost, s": 0.1}, "cases": 1}
    other = {"outcome": "failed", "reason": "", "seconds": 2.0, "figures": {"kills": 50, "lost, s": 0.3}, "cases": 1}
    both = page.joined(one, other)
    assert (both["outcome"], both["seconds"], both["cases"]) == ("failed", 3.0, 2)
    assert both["figures"] == {"kills": 150, "lost, s": 0.3}
