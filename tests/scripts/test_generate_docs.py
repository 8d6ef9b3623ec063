"""What is generated from the code: tables that line up, every command, setting and variable, and what is stale."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from tests.loading import module_at

from foreshock.cli.main import app
from foreshock.contract.variables import VARIABLES
from foreshock.monitor.config import AgentConfig
from foreshock.server.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """scripts/generate_docs.py."""
    return module_at(ROOT / "scripts" / "generate_docs.py")


@given(
    rows=st.integers(1, 4).flatmap(
        lambda columns: st.lists(st.tuples(*[st.text("ab|\n é", max_size=9)] * columns), min_size=1, max_size=5)
    )
)
def test_a_table_lines_up_and_no_cell_ends_another(docs: ModuleType, rows: list[tuple[str, ...]]) -> None:
    head, *rest = rows
    lines = list(docs.table(head, rest))
    assert len(lines) == len(rows) + 1
    assert len({len(line) for line in lines}) == 1
    for line, row in zip([lines[0], *lines[2:]], rows, strict=True):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert cells == [cell.replace("|", "\\|").replace("\n", " ").strip() for cell in row]


def test_every_setting_of_agent_and_service_has_a_row_with_its_variable(docs: ModuleType) -> None:
    page = "\n".join(docs.settings())
    for name in AgentConfig.model_fields:
        assert re.search(rf"^\| `{name}` +\|.*`FORESHOCK_{name.upper()}`", page, re.MULTILINE), name
    for variable in Settings.variables():
        assert f"`{variable.removesuffix('_FILE')}`" in page  # the page says of which it may be a file


def test_every_option_of_the_product_is_explained_and_every_command_of_a_checkout_listed(docs: ModuleType) -> None:
    page = "\n".join(docs.commands())
    whole = typer.main.get_command(app)
    options = 0
    for path, command in docs._leaves(whole, "foreshock"):
        if path.split()[1] in docs.RESEARCH:
            assert re.search(rf"^- `{path}`: \w+ \w+", page, re.MULTILINE), path
            continue
        section = page.split(f"## `{path}`\n")[1].split("\n## ")[0]
        for name in (name for each in command.params if each.name != "help" for name in each.opts if name[:2] == "--"):
            where = page if re.search(rf"^- also .*`{name}`", section, re.MULTILINE) else section
            (meaning,) = re.findall(
                rf"^- .*`{name}`.*?: (.*)$", where.split("\n## ")[0] if where is page else where, re.MULTILINE
            )
            assert len(re.findall(r"[a-z]{2,}", meaning)) >= 2, (path, name)
            options += 1
    assert options > 60


def test_the_variables_that_are_read_are_those_of_the_contract(docs: ModuleType) -> None:
    made: dict[str, tuple[str, ...]] = {}
    exec("\n".join(docs.variables()), made)
    assert made["VARIABLES"] == VARIABLES
    assert list(VARIABLES) == sorted(set(VARIABLES))


def test_what_is_stale_is_named_and_writing_it_makes_it_fresh(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines() -> Iterator[str]:
        yield "# Two"
        yield "lines"

    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "PAGES", {tmp_path / "page.md": ("<!-- note -->\n", lines)})
    assert docs.main(check=True) == 1
    assert "stale: page.md; run `make docs`" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
    assert docs.main(check=False) == 0
    assert (tmp_path / "page.md").read_text() == "<!-- note -->\n# Two\nlines\n"
    assert docs.main(check=True) == 0
    (tmp_path / "page.md").write_text("# Two\nwords\n")
    assert docs.main(check=True) == 1
