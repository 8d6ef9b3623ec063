"""What the documents name is there: files, tests, and public names."""

import inspect
import re
from pathlib import Path

import foreshock
from foreshock import callbacks, client
from foreshock.kernels import flash_attention

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


def test_the_reference_describes_every_public_name_from_its_docstring() -> None:
    """A class or function stands under the name that it has at home, which is what Sphinx reads."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    described = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)(?:\(.*\))?$", page, re.MULTILINE))
    public = [
        *(getattr(foreshock, name) for name in ("Agent", "AgentConfig", "Assessment", "assess", "attach", "detach")),
        *(getattr(callbacks, name) for name in dir(callbacks) if name[0] != "_"),
        *(value for name, value in vars(client).items() if name[0] != "_" and inspect.isclass(value)),
        *(
            getattr(flash_attention, name)
            for name in flash_attention.__all__
            if name not in ("Numerics", "CausalAlignment")
        ),
    ]
    ours = [value for value in public if value.__module__.startswith("foreshock.")]
    assert len(ours) >= 14
    assert {f"{value.__module__}.{value.__qualname__}" for value in ours} <= described
    assert {f"foreshock.kernels.flash_attention.spec.{name}" for name in ("Numerics", "CausalAlignment")} <= described
    assert [value for value in ours if len((value.__doc__ or "").split()) < 8] == []


def test_contributing_lists_the_files_that_each_addition_touches_and_each_is_there() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## To add something")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?:a|an) (\w+)[^|]*\|(.*)\|$", section, re.MULTILINE)
    others = ["cause", "attention", "mode", "callback", "alert", "setting"]
    assert [what for what, _ in rows] == ["statistic", "metric", "condition", *others]
    for what, files in rows:
        named = re.findall(r"`((?:[a-z]+/)+[\w./-]*)`", files)
        assert named, what
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_drawing_of_the_ways_through_the_code_names_files_that_are_there() -> None:
    drawing = (ROOT / "docs" / "design.md").read_text().split("## Three ways through the code")[1].split("\n## ")[0]
    named = re.findall(r"(?:[a-z_]+/)+[a-z_]+\.py", drawing)
    assert len(set(named)) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []
