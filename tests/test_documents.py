"""What the documents name is there: files, and tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def documents() -> list[Path]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "src"]
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return [page for page in pages if "node_modules" not in page.parts]


def test_every_file_that_a_document_links_to_is_there() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in documents()
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if not target.startswith(("http:", "https:")) and not (page.parent / target).exists()
    ]
    assert len(documents()) > 20
    assert lost == []


def test_every_test_that_a_document_names_is_there() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    known = {path.stem for path in files}
    known |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {(page, name) for page in documents() for name in re.findall(r"\btest_\w+", page.read_text())}
    assert len(named) > 20
    assert sorted(f"{page.relative_to(ROOT)}: {name}" for page, name in named if name not in known) == []


def test_every_file_to_touch_that_the_design_names_is_there() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    section = design.split("## To add something")[1].split("\n## ")[0]
    named = re.findall(r"`((?:contract|kernels|monitor|server|lab|dashboards)/[\w./]+)`", section)
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []
