"""What the documents name is there: files, tests, promises and public names; generated pages name what they must."""

import inspect
import re
import tomllib
from itertools import groupby
from pathlib import Path

from tests.loading import module_at

import foreshock
from foreshock import callbacks, client
from foreshock.kernels import flash_attention
from foreshock.monitor.config import AgentConfig
from foreshock.server.settings import Settings

ROOT = Path(__file__).parents[1]
CODE = ROOT / "src/foreshock"
DOCS = module_at(ROOT / "scripts" / "generate_docs.py")


def documents() -> list[Path]:
    pages = [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "src", "tests") for page in (ROOT / folder).rglob("*.md")),
    ]
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
    assert named
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
    members = set(re.search(r"agent\.Agent\n   :members: (.*)", page)[1].split(", "))  # type: ignore[index]
    assert members == {name for name in vars(foreshock.Agent) if name[0] != "_"}


def test_the_files_that_the_design_names_for_each_addition_and_on_each_way_through_the_code_are_there() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    additions, ways = (
        design.split(f"## {title}")[1].split("\n## ")[0]
        for title in ("To add something", "Three ways through the code")
    )
    rows = dict(re.findall(r"^\| (?:a|an) (\w+)[^|]*\|(.*)\|$", additions, re.MULTILINE))
    others = ("cause", "order", "attention", "mode", "callback", "alert", "setting")
    assert tuple(rows) == ("statistic", "metric", "condition", *others)
    named = {what: re.findall(r"`((?:[a-z]+/)+[\w./-]*)`", files) for what, files in rows.items()}
    assert all(named.values())
    drawn = re.findall(r"(?:[a-z_]+/)+[a-z_]+\.py", ways)
    assert len(set(drawn)) > 30
    every = {name for names in (*named.values(), drawn) for name in names}
    assert [name for name in every if not ((CODE / name).exists() or (ROOT / name).exists())] == []


def test_every_promise_has_a_test_and_every_mark_a_promise() -> None:
    parts = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())
    promised = [promise for part in parts.values() for promise in part]
    assert set(DOCS.proofs()) == set(promised)
    for letter, group in groupby(promised, key=lambda promise: promise[0]):
        numbers = [int(promise[1:]) for promise in group]
        assert numbers == sorted(set(numbers)), f"promises {letter} have the numbers {numbers}"


def test_every_setting_of_agent_and_service_has_a_row_with_its_variable() -> None:
    page = "\n".join(DOCS.settings())
    for name in AgentConfig.model_fields:
        assert re.search(rf"^\| `{name}[.`].*`FORESHOCK_{name.upper()}`", page, re.MULTILINE), name
    for variable in Settings.variables():
        assert f"`{variable.removesuffix('_FILE')}`" in page  # the page says of which it may be a file


def test_every_command_and_every_option_is_explained() -> None:
    page = "\n".join(DOCS.commands())
    named = re.findall(r"^\* `(.*?)`(?:: (.*))?$", page, re.MULTILINE)
    assert len(named) > 100
    assert [name for name, meaning in named if len(re.findall(r"[a-z]{2,}", meaning)) < 2] == []


def test_every_picture_is_drawn_by_a_command_and_is_shown() -> None:
    shots = module_at(ROOT / "scripts" / "screenshots.py")
    drawn = [picture.name for picture in shots.PICTURES]
    elsewhere = {"paper-run", "paper-all-tokens", "paper-seeds", "lab-explosion", "lab-leads"}  # of finished studies
    there = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    assert there == {*drawn, *elsewhere}
    assert len(drawn) == len(set(drawn))
    assert {name for page in documents() for name in re.findall(r"images/([a-z-]+)\.png", page.read_text())} == there
