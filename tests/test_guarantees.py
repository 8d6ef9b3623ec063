"""Every test that a document names as the proof of something exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEFINED = {
    name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
}
NAMED = {
    page.relative_to(ROOT).as_posix(): set(re.findall(r"`(test_\w+)`", page.read_text()))
    for page in (ROOT / "docs").glob("*.md")
}


@pytest.mark.parametrize("page", [page for page, names in NAMED.items() if names])
def test_every_test_that_a_page_names_as_a_proof_exists(page: str) -> None:
    assert not NAMED[page] - DEFINED


def test_every_row_of_the_agents_table_names_a_test() -> None:
    page = (ROOT / "docs" / "agent.md").read_text()
    rows = page.partition("| guarantee | test |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) > 10
    assert not [row for row in rows if "`test_" not in row]
