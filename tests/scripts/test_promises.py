"""Every promise has a test, and docs/reliability.md names its file."""

import tomllib
from itertools import groupby
from pathlib import Path
from types import ModuleType

import pytest
from tests.loading import module_at

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """scripts/generate_docs.py."""
    return module_at(ROOT / "scripts" / "generate_docs.py")


def promised() -> list[str]:
    parts = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    return [promise for part in parts.values() for promise in part]


def test_every_promise_has_a_test_and_every_mark_a_promise(docs: ModuleType) -> None:
    assert set(docs.proofs()) == set(promised())


def test_promises_stand_in_the_order_of_their_numbers() -> None:
    for letter, group in groupby(promised(), key=lambda promise: promise[0]):
        numbers = [int(promise[1:]) for promise in group]
        assert letter in "ASK"
        assert numbers == sorted(set(numbers)), f"promises {letter} have the numbers {numbers}"


def test_the_page_is_what_the_marks_say(docs: ModuleType) -> None:
    page = ROOT / "docs" / "reliability.md"
    assert dict(docs.texts())[page] == page.read_text()


def test_a_promise_without_a_test_makes_no_page(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unproven = tmp_path / "promises.toml"
    unproven.write_text('[agent]\nA1 = "Kept."\nA99 = "Nobody tests this."\n')
    monkeypatch.setattr(docs, "PROMISES", unproven)
    with pytest.raises(KeyError, match="A99"):
        list(docs.promises())
